"""Any config.json is a model's configuration, or one line that names what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minivllm.errors import BadInput
from minivllm.models.config import ModelConfig
from minivllm.models.family_defaults import FAMILIES
from minivllm.models.load.source import resolve
from minivllm.platform.values import Values
from tests.damage import damaged
from tests.models.load.test_source import node
from tests.models.test_config import BASE, LLAMA3, ROPES, small

NAN, INF = float("nan"), float("inf")
GEMMA = BASE | {"architectures": ["Gemma2ForCausalLM"], "num_key_value_heads": 2}
MOE = BASE | {"architectures": ["Qwen3MoeForCausalLM"], "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("base", "key", "value"),
    [
        *((BASE, "architectures", value) for value in ({"a": 1}, "LlamaForCausalLM", [7], [])),
        *((BASE, "rms_norm_eps", value) for value in ("1e-6", None, -1.0, 0, NAN, INF, True, 2.0)),
        *(
            (BASE, "hidden_size", value)
            for value in (-4, 0, 10**12, 64.5, "64", True, [64], NAN, None, 62)
        ),
        *((BASE, "num_hidden_layers", value) for value in (0, 10**6)),
        *((BASE, "vocab_size", value) for value in (-5, 10**10)),
        *((BASE, "intermediate_size", value) for value in (0, 10**10)),
        *((BASE, "num_attention_heads", value) for value in (-4, 10**5)),
        *((BASE, "num_key_value_heads", value) for value in (0, -2, 8, 3, "2")),
        *((BASE, "head_dim", value) for value in (0, -16, 15, 10**6)),
        *((BASE, "max_position_embeddings", value) for value in (-1, 0, "many", 10**12, INF)),
        *((BASE, "rope_theta", value) for value in ("x", -5.0, 0, 1, NAN, INF, [1e4])),
        *((BASE, "rope_scaling", value) for value in ([1, 2], "yarn", 4, True)),
        *((BASE, "partial_rotary_factor", value) for value in (0, -1.0, 1.5, NAN, "1")),
        *((BASE, "tie_word_embeddings", value) for value in ("false", 1, [])),
        *((BASE, "attention_bias", value) for value in ("no", 0)),
        *((BASE, "hidden_act", value) for value in (["silu"], {"a": 1}, "tanh")),
        *((BASE, "layer_types", value) for value in ("full_attention", [1, 2], {"a": 1})),
        *((BASE, "quantization_config", value) for value in ("awq", ["awq"], 4)),
        *(
            (BASE, "eos_token_id", value)
            for value in ("</s>", {"a": 1}, -1, [1, -1], [1, "2"], 1.5, True)
        ),
        *((BASE, "dtype", value) for value in (16, ["float16"])),
        *((BASE, "text_config", value) for value in ([1], "text", 3)),
        *((GEMMA, "query_pre_attn_scalar", value) for value in (-1.0, 0, NAN, "256")),
        *((GEMMA, "attn_logit_softcapping", value) for value in (-50.0, 0, INF, "50")),
        *((GEMMA, "sliding_window", value) for value in (0, -1, "7", 1.5)),
        *((MOE, "num_experts", value) for value in (-1, 10**9, "8")),
        *((MOE, "num_experts_per_tok", value) for value in (0, -1, 129, "2")),
        *((MOE, "mlp_only_layers", value) for value in (1, [-1], ["0"])),
        *((MOE, "decoder_sparse_step", value) for value in (0, -1)),
    ],
)
def test_a_value_out_of_its_type_or_range_is_one_line_with_file_and_key(
    base: dict[str, Any], key: str, value: Any
) -> None:
    with pytest.raises(BadInput) as caught:
        ModelConfig.from_dict(base | {key: value}, "folder/config.json")
    message = str(caught.value)
    assert (
        message.startswith("folder/config.json")
        and key in message
        and "\n" not in message
        and len(message) < 250
    )


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        *(("linear", {"factor": value}) for value in (-2.0, 0, 0.5, NAN, INF, "2", None, 1e9)),
        *(("dynamic", {"factor": value}) for value in (-2.0, NAN)),
        *(
            ("yarn", {"original_max_position_embeddings": value})
            for value in (-5, 0, 1, "512", 10**12, 3.5)
        ),
        *(("yarn", {"beta_fast": value}) for value in (-1, 0, 0.5, NAN, "32")),
        *(("yarn", {"attention_factor": value}) for value in (-1, 0, INF)),
        *(("yarn", {"mscale": value}) for value in (-1, NAN, "1")),
        ("yarn", {"truncate": "no"}),
        ("yarn", {"factor": 1e6, "original_max_position_embeddings": 1 << 20}),
        ("llama3", {"low_freq_factor": 4.0}),
        ("llama3", {"low_freq_factor": -1.0}),
        *(
            ("longrope", {"short_factor": value})
            for value in ([1.0] * 7, [0.0] * 8, ["1"] * 8, [NAN] * 8, 1.0)
        ),
        ("default", {"rope_theta": -5.0}),
        ("default", {"rope_type": 7}),
        ("default", {"rope_type": "axial"}),
    ],
)
def test_a_rope_out_of_its_range_is_refused_with_its_key(kind: str, change: dict[str, Any]) -> None:
    rope = {"rope_type": kind, "rope_theta": 1e4, **ROPES[kind]} | change
    for name in ("rope_parameters", "rope_scaling"):
        with pytest.raises(BadInput, match=rf"^config\.json: .*{next(iter(change))}"):
            ModelConfig.from_dict(BASE | {name: rope})


def test_a_dynamic_rope_of_two_dimensions_is_refused() -> None:
    scaling = {"type": "dynamic", "factor": 2.0}
    with pytest.raises(BadInput, match="at least 4 rotated dimensions"):
        ModelConfig.from_dict(BASE | {"head_dim": 2, "rope_scaling": scaling})


def test_numbers_may_be_written_either_way() -> None:
    floats = {key: float(value) if isinstance(value, int) else value for key, value in BASE.items()}
    assert ModelConfig.from_dict(floats) == ModelConfig.from_dict(BASE)
    whole = ModelConfig.from_dict(BASE | {"rope_theta": 10000, "eos_token_id": [1.0, 2]})
    assert whole == ModelConfig.from_dict(BASE | {"rope_theta": 1e4, "eos_token_id": [1, 2]})


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_keys_that_a_family_does_not_have_change_nothing(architecture: str) -> None:
    base = small(architecture)
    foreign = {
        "attention_bias": True,
        "mlp_bias": True,
        "query_pre_attn_scalar": 99,
        "attn_logit_softcapping": 9.0,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [0],
        "rope_local_base_freq": 5e4,
        "max_window_layers": 1,
        "use_sliding_window": False,
    }
    unknown = {
        key: value for key, value in foreign.items() if key not in FAMILIES[architecture].keys
    }
    assert ModelConfig.from_dict(base | unknown | {"no_such_key": [None]}) == ModelConfig.from_dict(
        base
    )


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_the_model_type_tells_what_a_file_without_architectures_is(architecture: str) -> None:
    import transformers

    kind = getattr(transformers, architecture).config_class.model_type
    base = small(architecture) | {"model_type": kind}
    for message in (None, ["SomethingModel"]):
        assert ModelConfig.from_dict(base | {"architectures": message}).architecture == architecture


KEYS = sorted(
    {
        *BASE,
        *LLAMA3,
        *(key for rope in ROPES.values() for key in rope),
        *(key for family in FAMILIES.values() for key in (*family.keys, *family.defaults)),
        *(
            "rope_parameters",
            "rope_scaling",
            "rope_type",
            "type",
            "rope_theta",
            "full_attention",
            "text_config",
        ),
        *(
            "sliding_attention",
            "partial_rotary_factor",
            "layer_types",
            "eos_token_id",
            "dtype",
            "torch_dtype",
        ),
        *("tie_word_embeddings", "quantization_config", "model_type", "attention_factor", "mscale"),
    }
)
ODD = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-4, 600)
    | st.floats()
    | st.floats(0, 64)
    | st.text(max_size=3)
    | st.sampled_from(["1e-6", "silu", "yarn", 10**400, "full_attention", [0] * 70])
)
JSON = st.recursive(
    ODD,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)
    ),
    max_leaves=6,
)
CONFIGS = [
    json.dumps(config).encode() for config in (LLAMA3, GEMMA, MOE, BASE | {"text_config": BASE})
]
MUTATIONS = st.dictionaries(st.sampled_from(KEYS), JSON, max_size=4)


@pytest.mark.fuzz("config.json")
@given(
    architecture=st.sampled_from(sorted(FAMILIES)),
    rope=st.sampled_from(sorted(ROPES)),
    change=MUTATIONS,
    rope_change=MUTATIONS,
    nested=st.booleans(),
)
def test_any_mutation_is_a_configuration_or_bad_input(
    architecture: str, rope: str, change: dict[str, Any], rope_change: dict[str, Any], nested: bool
) -> None:
    config = BASE | {
        "architectures": [architecture],
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": rope, "rope_theta": 1e4, **ROPES[rope]} | rope_change,
    }
    config = {**config, "text_config": change} if nested else config | change
    try:
        read = ModelConfig.from_dict(config)
    except BadInput as error:
        assert "\n" not in str(error) and len(str(error)) < 400
    else:
        assert (
            min(
                read.vocab_size, read.hidden_size, read.num_layers, read.head_dim, read.num_kv_heads
            )
            >= 1
        )
        assert 0 < read.rms_norm_eps <= 1 and 0 < read.attention_scale < INF
        assert len(read.layer_types) == read.num_layers
        assert read.max_position_embeddings <= 1 << 26


@pytest.mark.fuzz("config.json")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    config=st.sampled_from(CONFIGS).flatmap(damaged),
    generation=damaged(
        b'{"eos_token_id": [1, 2], "temperature": 0.6, "top_p": 0.9, "do_sample": true}'
    )
    | st.none(),
)
def test_any_bytes_are_a_configuration_or_one_line(
    tmp_path: Path, config: bytes, generation: bytes | None
) -> None:
    (tmp_path / "config.json").write_bytes(config)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (tmp_path / "generation_config.json").write_bytes(generation)
    with pytest.raises(BadInput) as caught:  # the folder has no weights
        resolve(node(tmp_path), False)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_a_value_is_shown_short_and_without_control_characters() -> None:
    for value in ("\x1b[31m" * 99, [0] * 10**5, 10**5000):
        with pytest.raises(BadInput) as caught:
            Values({"key": value}, "file").flag("key", False)
        assert len(str(caught.value)) < 200 and str(caught.value).isprintable()


@pytest.mark.parametrize(
    "content", [b"[1]", b"{", b"\xff\xfe", b'{"a": ' * 60_000, b'"x"', b" " * (5 << 20)]
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_files_that_are_no_objects_are_one_line(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInput, match=name) as caught:
        resolve(node(tmp_path), False)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize("value", ["</s>", -1, [1, None], {"a": 1}, 1.5])
def test_an_end_that_is_no_id_is_told_with_its_file(value: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(BadInput, match=r"generation_config\.json: eos_token_id="):
        resolve(node(tmp_path), False)
