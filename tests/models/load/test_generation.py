"""What a checkpoint says of generation: ends of answers, and decoding parameters that nobody
sets."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from minivllm import LLM, BadInput, SamplingParams
from minivllm.config.compose import build, compose
from minivllm.models.config import ModelConfig
from minivllm.models.load.generation import decoding_defaults, described, unset_defaults
from minivllm.models.load.source import resolve
from minivllm.platform.given import LEAST
from tests.reference import make_checkpoint

VOCAB = 128


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    make_checkpoint(folder, "llama")
    return folder


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> Any:
    """A checkpoint with other files beside its weights: keys of config.json, and whole files; None
    leaves one out."""

    def make(
        eos: Any = None,
        generation: Any = None,
        tokenizer: dict[str, Any] | None = None,
        **names: Any,
    ) -> Path:
        for path in saved.iterdir():
            (tmp_path / path.name).unlink(missing_ok=True)
            (tmp_path / path.name).symlink_to(path)
        config = json.loads((saved / "config.json").read_text()) | {"eos_token_id": eos}
        files = {
            "config.json": config,
            "generation_config.json": generation,
            "tokenizer_config.json": tokenizer,
            **names,
        }
        for name, content in files.items():
            (tmp_path / name).unlink(missing_ok=True)
            if content is not None:
                (tmp_path / name).write_text(json.dumps(content))
        if tokenizer is not None:
            fast = Tokenizer(models.WordLevel({f"w{i}": i for i in range(20)}, unk_token="w0"))
            fast.decoder = decoders.Fuse()
            fast.add_special_tokens(
                [AddedToken("<end>", special=True), AddedToken("<other>", special=True)]
            )
            fast.save(str(tmp_path / "tokenizer.json"))
        return tmp_path

    return make


def ends(folder: Path) -> tuple[int, ...]:
    source = resolve({"path": str(folder)}, allow_random=False)[1]
    return ModelConfig.from_dict(source.config).eos_token_ids


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"eos": 3}, (3,)),
        ({"eos": [3, 4]}, (3, 4)),
        ({}, ()),
        ({"eos": 3, "generation": {"eos_token_id": 5}}, (5,)),
        ({"eos": 3, "generation": {"eos_token_id": [5, 6, 5]}}, (5, 6)),
        ({"eos": 3, "generation": {"eos_token_id": []}}, (3,)),
        ({"eos": 3, "generation": {"eos_token_id": None}}, (3,)),
        ({"eos": 3, "generation": {}}, (3,)),
        ({"eos": 3, "tokenizer": {"eos_token": "<end>"}}, (3, 20)),
        (
            {
                "eos": 3,
                "tokenizer": {"eos_token": {"content": "<end>"}},
                "generation": {"eos_token_id": [5]},
            },
            (5, 20),
        ),
        ({"eos": 20, "tokenizer": {"eos_token": "<end>"}}, (20,)),
        ({"eos": 3, "tokenizer": {"pad_token": "<end>"}}, (3,)),
        ({"eos": 3, "tokenizer": {"eos_token": "nowhere"}}, (3,)),
        (
            {
                "tokenizer": {
                    "eos_token": "<end>",
                    "added_tokens_decoder": {"20": {"content": "<end>"}},
                }
            },
            (20,),
        ),
        ({"tokenizer": {}, "special_tokens_map.json": {"eos_token": "<other>"}}, (21,)),
    ],
)
def test_an_answer_ends_as_in_vllm(
    checkpoint: Any, files: dict[str, Any], expected: tuple[int, ...]
) -> None:
    assert ends(checkpoint(**files)) == expected


@pytest.mark.parametrize("ids", [-1, [3, -1], True, "3", 1.5, {"a": 1}, [[3]]])
@pytest.mark.parametrize("where", ["eos", "generation"])
def test_what_is_no_id_is_refused_by_the_file_s_name(checkpoint: Any, ids: Any, where: str) -> None:
    folder = checkpoint(
        **({"eos": ids} if where == "eos" else {"generation": {"eos_token_id": ids}})
    )
    with pytest.raises(BadInput, match=r"config\.json: eos_token_id="):
        ends(folder)


def test_ids_that_the_vocabulary_lacks_are_left_out_aloud(checkpoint: Any) -> None:
    folder = checkpoint(eos=[3, VOCAB, 50_000])
    source = resolve({"path": str(folder)}, allow_random=False)[1]
    assert ModelConfig.from_dict(source.config).eos_token_ids == (3,)
    assert "the vocabulary of 128 lacks 128, 50000" in source.warnings[-1]
    with LLM(str(folder), quant="fp32", device="cpu", overrides=["cache.num_blocks=20"]) as llm:
        assert source.warnings[-1] in llm.engine.loaded.warnings


def test_engine_and_harness_end_alike(checkpoint: Any) -> None:
    folder = checkpoint(eos=3, tokenizer={"eos_token": "<end>"})
    overrides = [
        "model=hf",
        f"model.path={folder}",
        "engine=simulated",
        "engine.bandwidth_gb_s=10",
        "engine.tflops=1",
    ]
    config = compose(overrides)
    assert build(config["engine"], config=config).info.eos_token_ids == (3, 20)
    with LLM(str(folder), quant="fp32", device="cpu", overrides=["cache.num_blocks=20"]) as llm:
        for token in (3, 20):
            params = SamplingParams(max_tokens=4, logit_bias={token: 100.0})
            (out,) = llm.generate([[5]], params)[0].outputs
            assert (out.token_ids, out.finish_reason) == ([token], "stop")


FILE = {
    "do_sample": True,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "repetition_penalty": 1.05,
    "max_new_tokens": 9,
}
READ = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05, "max_tokens": 9}


def test_defaults_are_read_as_in_vllm(checkpoint: Any) -> None:
    assert decoding_defaults(checkpoint(generation=FILE)) == READ
    assert decoding_defaults(checkpoint(generation={"do_sample": True})) == {"temperature": 1.0}
    assert decoding_defaults(checkpoint(generation={"eos_token_id": 3, "max_length": 20})) == {}
    assert decoding_defaults(checkpoint()) == decoding_defaults(None) == {}
    for wrong in (
        {"top_p": 2},
        {"temperature": "hot"},
        {"top_k": -5},
        {"repetition_penalty": 0},
        {"do_sample": 3},
    ):
        with pytest.raises(BadInput, match=r"generation_config\.json: "):
            decoding_defaults(checkpoint(generation=wrong))


def test_a_number_too_near_to_0_is_the_least_that_is_served_and_said(checkpoint: Any) -> None:
    tiny = {"temperature": 1e-6, "top_p": 1e-50, "repetition_penalty": 1e-40}
    found = decoding_defaults(checkpoint(generation=tiny))
    assert found == LEAST and SamplingParams(**found).temperature == 1e-3
    named = described({**found, "top_k": 4})
    assert "sets temperature=0.001 (the least that is not 0), top_p=" in named
    assert "sets temperature=0.0, top_k=4, which" in described({"temperature": 0.0, "top_k": 4})
    assert decoding_defaults(checkpoint(generation={"temperature": 0})) == {"temperature": 0.0}
    said = pytest.warns(UserWarning, match=r"temperature=0\.001 \(the least that is not 0\)")
    folder = str(checkpoint(generation=tiny))
    with LLM(folder, device="cpu", overrides=["cache.num_blocks=20"]) as llm, said:
        llm.generate([[5]])


def test_what_the_user_sets_goes_before() -> None:
    decoding = {
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
        "min_p": 0.0,
        "max_tokens": 128,
        "beam_width": 1,
    }
    found = {"temperature": 0.6, "top_p": 0.9}
    assert unset_defaults(decoding, [], found) == {"temperature": 0.6, "top_p": 0.9, "top_k": 0}
    assert unset_defaults(decoding, ["temperature", "top_k"], found) == {"top_p": 0.9}
    assert (
        unset_defaults(decoding, ["decoding"], found) == unset_defaults(decoding, None, found) == {}
    )
    assert unset_defaults(decoding, [], {"max_tokens": 5}) == {"max_tokens": 5}
    assert unset_defaults({**decoding, "beam_width": 4}, [], {**found, "max_tokens": 5}) == {
        "max_tokens": 5
    }


def test_the_defaults_hold_in_python_and_are_said_once(checkpoint: Any) -> None:
    folder = checkpoint(generation=FILE)

    def load(*overrides: str, **groups: str) -> LLM:
        return LLM(
            str(folder),
            quant="fp32",
            device="cpu",
            overrides=["cache.num_blocks=20", *overrides],
            **groups,
        )

    with load() as llm:
        assert llm.default_params == SamplingParams(**READ)
        with pytest.warns(
            UserWarning,
            match=r"generation_config\.json sets temperature=0\.6, .* which decoding leaves open",
        ):
            assert llm.get_default_sampling_params() == llm.default_params
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert len(llm.generate([[5]])[0].outputs[0].token_ids) <= 9
            assert (
                len(llm.generate([[5]], SamplingParams(ignore_eos=True))[0].outputs[0].token_ids)
                == 16
            )
    with load("decoding.temperature=0", "decoding.max_tokens=3") as llm:
        kept = {**READ, "temperature": 0.0, "max_tokens": 3}
        assert llm.default_params == SamplingParams(**kept)
    with load(decoding="greedy") as llm:
        assert llm.default_params == SamplingParams(max_tokens=128) and not llm.checkpoint_defaults
    with LLM.from_config(
        compose(["model=hf", f"model.path={folder}", "cache.num_blocks=20"])
    ) as llm:
        assert llm.default_params == SamplingParams(max_tokens=128)  # as a benchmark has it
    chat = compose(
        [
            "preset=chat",
            "model=hf",
            f"model.path={folder}",
            "decoding.top_k=3",
            "cache.num_blocks=20",
        ]
    )
    with LLM.from_config(chat) as llm:
        assert llm.default_params == SamplingParams(**{**READ, "top_k": 3})
