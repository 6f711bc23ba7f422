"""Finding a model, and refusing what is not usable, in one line and within seconds."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from minivllm.errors import BadInput
from minivllm.models.load import source as source_module
from minivllm.models.load.checkpoint import INDEX, SINGLE, Checkpoint
from minivllm.models.load.source import resolve
from tests.gguf_files import LLAMA, tensors, write
from tests.models.load.test_loading import ARCHITECTURE
from tests.reference import make_checkpoint

NORM = "model.norm.weight"
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture(scope="module")
def weights_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("file")
    make_checkpoint(folder)
    return (folder / "model.safetensors").read_bytes()


@pytest.fixture
def no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache, and a hub that is not asked."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(source_module, "_cached", lambda path: None)


def node(path: object = "Qwen/Qwen3-0.6B", **changes: Any) -> dict[str, Any]:
    return {"path": str(path), "weights": "auto", "seed": 0, "architecture": None} | changes


def test_a_gguf_file_is_a_checkpoint_with_everything(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", LLAMA | {"tokenizer.ggml.eos_token_id": 7}, tensors())
    given, source = resolve(node(path), allow_random=False)
    assert (given, source.folder, source.weights) == (node(path), path, "checkpoint")
    assert source.config["eos_token_id"] == [7] and len(source.fingerprint) == 64
    assert resolve(node("x", weights=str(path)), allow_random=False)[1] == source
    _, random = resolve(node(path, weights="random"), allow_random=True)
    assert random.config == source.config and random.folder == path
    with pytest.raises(BadInput, match=r"engine=vllm takes a folder .* GGUF file model.gguf"):
        source.reject_gguf("engine=vllm")


def test_gguf_files_are_named_where_a_folder_or_nothing_is_given(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", LLAMA, tensors())
    with pytest.raises(BadInput, match=r"no config.json, but GGUF files: give model.path=\S+gguf"):
        resolve(node(tmp_path), allow_random=False)
    with pytest.raises(BadInput, match=r"absent.gguf does not exist: give a folder"):
        resolve(node("absent.gguf"), allow_random=True)
    with pytest.raises(
        BadInput, match=r"weights=none does not exist: give auto, hub, random, a fo"
    ):
        resolve(node(weights="none"), allow_random=True)


def test_a_local_folder_is_taken_and_resolving_again_is_the_same(folder: Path) -> None:
    resolved, source = resolve(node(folder), allow_random=False)
    assert (source.folder, source.weights, source.warnings) == (folder, "checkpoint", [])
    assert resolved == node(folder)  # what it was found under, not where this machine has it
    assert resolve(resolved, allow_random=False) == (resolved, source)


def test_weights_may_name_the_folder_itself(folder: Path) -> None:
    _, source = resolve(node(weights=str(folder), architecture=ARCHITECTURE), allow_random=False)
    assert source.folder == folder
    assert source.config["hidden_size"] == 48  # the folder's, not the option's


def test_generation_config_overrides_the_end_of_sequence(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    assert resolve(node(folder), False)[1].config["eos_token_id"] == [3, 4]
    (folder / "generation_config.json").write_text("{}")
    assert resolve(node(folder), False)[1].config["eos_token_id"] == 1


def test_a_generation_config_without_an_end_leaves_that_of_a_part(folder: Path) -> None:
    """Checkpoints of several modalities have it in `text_config`: null beside it would hide it."""
    config = json.loads((folder / "config.json").read_text())
    del config["eos_token_id"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text('{"temperature": 1.0}')
    assert "eos_token_id" not in resolve(node(folder), False)[1].config


@pytest.mark.usefixtures("no_hub")
def test_auto_falls_back_to_random_only_where_allowed() -> None:
    resolved, source = resolve(node(architecture=ARCHITECTURE), allow_random=True)
    assert (resolved["weights"], source.weights, source.folder) == ("random", "random", None)
    assert "Qwen/Qwen3-0.6B" in source.warnings[0]
    assert "random" in source.warnings[0]
    again, second = resolve(resolved, allow_random=False)
    assert again == resolved
    assert second.fingerprint == source.fingerprint
    with pytest.raises(BadInput, match=r"Qwen/Qwen3-0\.6B.*weights=random"):
        resolve(node(architecture=ARCHITECTURE), allow_random=False)
    with pytest.raises(BadInput, match="HF_HUB_OFFLINE"):
        resolve(node(weights="hub", architecture=ARCHITECTURE), allow_random=True)
    with pytest.raises(
        BadInput, match=r"give model\.path=FOLDER with a checkpoint$"
    ):  # random in what architecture?
        resolve(node(), allow_random=False)


def test_a_hub_that_does_not_answer_costs_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(source_module, "_cached", lambda path: None)
    monkeypatch.setattr(source_module, "HUB_TIMEOUT_S", 0.2)
    answer = threading.Event()
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: answer.wait(30))
    _, source = resolve(node(architecture=ARCHITECTURE), allow_random=True)
    answer.set()
    assert "TimeoutError" in source.warnings[0]


def test_the_hub_cache_is_used_if_it_has_weights(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(source_module, "_cached", lambda path: folder)
    assert resolve(node(), False)[1].folder == folder
    (folder / "model.safetensors").unlink()
    with pytest.raises(BadInput, match="hub"):
        resolve(node(), False)


def test_random_weights_take_the_architecture_of_a_folder(folder: Path) -> None:
    source = resolve(node(folder, weights="random"), False)[1]
    assert (source.weights, source.folder) == ("random", folder)
    assert source.config["hidden_size"] == 48


def _no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{ not json")


def _unsupported(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"architectures": ["GPT2LMHeadModel"]})
    )


def _truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _garbage(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\x50\x4b\x03\x04" * 100)


def _empty(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def _pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _indexed(folder: Path, index: Any) -> None:
    (folder / INDEX).write_text(json.dumps(index))


def _missing_shard(folder: Path) -> None:
    _indexed(folder, {"weight_map": {"a": SINGLE, "b": "model-00002-of-00002.safetensors"}})


def _wrong_shard(folder: Path) -> None:
    other = "model-00002-of-00002.safetensors"
    save_file({"other": torch.zeros(1)}, folder / other)
    _indexed(
        folder,
        {"weight_map": {"model.norm.weight": other, "other": other, "lm_head.weight": SINGLE}},
    )


def _nowhere(folder: Path) -> None:
    _indexed(folder, {"weight_map": {"model.norm.bias": SINGLE}})


def _twice(folder: Path) -> None:
    whole = folder / SINGLE
    shutil.copy(whole, folder / "a.safetensors")
    whole.rename(folder / "b.safetensors")


def _header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Damage that `change` does to the parsed header; the tensors' bytes stay."""

    def damage(folder: Path) -> None:
        content = (folder / SINGLE).read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:end])
        text = json.dumps(change(header) or header).encode()
        (folder / SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + content[end:])

    return damage


def _no_json(folder: Path) -> None:
    content = bytearray((folder / SINGLE).read_bytes())
    content[8:12] = b"<!DO"
    (folder / SINGLE).write_bytes(bytes(content))


def _dangling(folder: Path) -> None:
    (folder / SINGLE).unlink()
    (folder / "other.safetensors").symlink_to(folder / "blob-that-is-gone")


def _a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, "does not exist"),
        (_a_file, "is neither a folder nor a GGUF file"),
        (_no_config, r"config\.json: there is no such file"),
        (_broken_config, r"config\.json is not valid JSON"),
        (_unsupported, r"config\.json: architecture GPT2LMHeadModel.*Qwen3ForCausalLM"),
        (
            _truncated,
            r"model\.safetensors has \d+ bytes where its header says \d+; tensor \S+ is cut "
            r"off.*again",
        ),
        (_garbage, r"model\.safetensors is not a readable safetensors file"),
        (_empty, r"model\.safetensors is not a readable safetensors file"),
        (_pickled, r"pickled weights.*python run\.py task=convert model\.path=\S+ task\.output="),
        (_no_weights, r"has no \.safetensors file"),
        (
            _missing_shard,
            r"names model-00002-of-00002\.safetensors \(for tensor b\).*\(1 missing\)",
        ),
        (
            _wrong_shard,
            r"model-00002-of-00002\.safetensors holds tensor "
            r"model\.norm\.weight.*\(model\.safe.* does\)",
        ),
        (
            _nowhere,
            r"says that model\.safetensors holds tensor model\.norm\.bias, which it does not:",
        ),
        (_twice, r"tensor \S+ is in a\.safetensors and b\.safetensors"),
        (_dangling, r"other\.safetensors: there is no such file"),
        (lambda f: _indexed(f, []), r"index\.json is not a JSON object"),
        (lambda f: _indexed(f, {"weight_map": []}), "has no weight_map"),
        (
            lambda f: _indexed(f, {"weight_map": {"a": 3}}),
            "tensor a is in 3, which is no file name",
        ),
        (lambda f: _indexed(f, {"weight_map": {"a": "../x"}}), r"tensor a is in '\.\./x'"),
        (
            _no_json,
            r"model\.safetensors is not a readable safetensors file.*header is not valid "
            r"JSON.*fetch it again",
        ),
        (_header(lambda h: [h]), "header is not a JSON object"),
        (_header(lambda h: h[NORM].pop("shape") and None), f"tensor {NORM} has no dtype, shape"),
        (
            _header(lambda h: h[NORM].update(shape=[49])),
            rf"tensor {NORM} is F32\[49\] in 192 bytes",
        ),
        (
            _header(lambda h: h[NORM].update(shape=[-48])),
            f"tensor {NORM} has a shape or offsets that cannot",
        ),
        (
            _header(lambda h: h[NORM].update(data_offsets=[4, 196])),
            f"tensor {NORM} begins at byte|is next",
        ),
    ],
)
def test_an_unusable_folder_is_refused_in_one_line(
    folder: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(folder)
    for allow_random in (False, True):  # a folder that was asked for is never replaced by noise
        with pytest.raises(BadInput, match=message) as caught:
            resolve(node(folder, architecture=ARCHITECTURE), allow_random)
        assert str(folder) in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.fuzz("weights")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_header_is_bad_input_and_nothing_else(
    weights_file: bytes, tmp_path: Path, data: st.DataObject
) -> None:
    length = 8 + int.from_bytes(weights_file[:8], "little")
    at = data.draw(st.integers(0, length - 1))
    damaged = bytearray(weights_file)
    damaged[at] ^= data.draw(st.integers(1, 255))
    (tmp_path / "model.safetensors").write_bytes(bytes(damaged))
    try:
        checkpoint = Checkpoint.open(tmp_path)
    except BadInput as error:
        assert "model.safetensors" in str(error)
    else:
        # a name or a shape may change and still be a header; the loader compares those with the
        # model
        assert all(0 <= t.begin <= t.end <= len(damaged) for t in checkpoint.tensors.values())


OFFSETS = st.lists(st.integers(-1, 2**70) | st.floats() | st.text(max_size=2), max_size=3)
ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "BF16", "F4"]) | st.none(),
        "shape": OFFSETS,
        "data_offsets": OFFSETS | st.tuples(st.integers(0, 40), st.integers(0, 40)),
    },
)
JSON = st.recursive(
    st.none() | st.integers() | st.text(max_size=3), lambda inner: st.lists(inner, max_size=3)
)
HEADERS = (
    st.binary(max_size=64)
    | st.dictionaries(st.text(max_size=3), ENTRY | JSON, max_size=3).map(
        lambda h: json.dumps(h).encode()
    )
    | JSON.map(lambda value: json.dumps(value).encode())
    | st.just(b"[" * 50_000)  # deeper than the parser can go
    | st.just(b'{"a": ' + b"9" * 5000 + b"}")  # longer than Python turns into a number
)


@pytest.mark.fuzz("weights")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(header=HEADERS, size=st.integers(0, 2**64 - 1) | st.none(), data=st.binary(max_size=40))
def test_any_bytes_are_a_checkpoint_or_bad_input(
    tmp_path: Path, header: bytes, size: int | None, data: bytes
) -> None:
    length = (len(header) if size is None else size).to_bytes(8, "little")
    (tmp_path / SINGLE).write_bytes(length + header + data)
    try:
        tensors = Checkpoint.open(tmp_path).tensors.values()
    except BadInput as error:
        assert SINGLE in str(error) and "\n" not in str(error)
    else:
        assert sum(tensor.end - tensor.begin for tensor in tensors) == len(data)


def hub_cache(cache: Path, folder: Path, repo: str = "Org/Model-1B") -> Path:
    """Lay a checkpoint out as the hub's client does: blobs, a snapshot of links to them, a ref to
    the snapshot."""
    root, revision = (
        cache / f"models--{repo.replace('/', '--')}",
        "0123456789abcdef0123456789abcdef01234567",
    )
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(revision)
    snapshot = root / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (root / "blobs").mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        shutil.copy(file, root / "blobs" / f"{number:040x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:040x}")
    return snapshot


def resolve_elsewhere(**environment: str) -> str:
    """What `resolve` finds for a hub id, in a process of its own: its client reads the variables
    when imported."""
    script = (
        "from minivllm.errors import BadInput\n"
        "from minivllm.models.load.source import resolve\n"
        "try:\n"
        "    print(resolve({'path': 'Org/Model-1B', 'weights': 'auto'}, False)[1].folder)\n"
        "except BadInput as error:\n"
        "    print('error:', error)\n"
    )
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**inherited, "HF_HUB_OFFLINE": "1", **environment},
    )
    return done.stdout.strip()


def test_a_hub_id_is_found_in_the_cache_that_the_environment_names(
    folder: Path, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    snapshot = hub_cache(home / "hub", folder)
    assert resolve_elsewhere(HF_HOME=str(home)) == str(snapshot)
    assert resolve_elsewhere(HF_HUB_CACHE=str(home / "hub"), HF_HOME=str(tmp_path)) == str(snapshot)
    message = resolve_elsewhere(HF_HOME=str(tmp_path / "empty"))
    assert message.startswith(
        "error: model.path=Org/Model-1B is no local folder, is not in the hub's cache"
    )
    assert "HF_HUB_OFFLINE is set" in message
    (snapshot / SINGLE).resolve().unlink()  # the link stays, as after a blob was deleted
    assert "model.safetensors: there is no such file" in resolve_elsewhere(HF_HOME=str(home))


def test_a_download_that_was_cut_short_is_completed_or_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, max_shard_size="60KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    content = shard.read_bytes()
    shard.unlink()
    monkeypatch.setattr(source_module, "_cached", lambda path: tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for allow_random in (False, True):  # there are weights: noise must not take their place
        with pytest.raises(BadInput, match=rf"names {shard.name} \(for tensor .*\(1 missing\)"):
            resolve(node(architecture=ARCHITECTURE), allow_random)

    def complete(path: str) -> tuple[Path, None]:
        shard.write_bytes(content)
        return tmp_path, None

    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(source_module, "_download", complete)
    assert resolve(node(), False)[1].folder == tmp_path


def test_pickled_weights_on_the_hub_are_not_even_downloaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import huggingface_hub

    files = [SimpleNamespace(rfilename=name) for name in ("config.json", "pytorch_model.bin")]
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(source_module, "_cached", lambda path: None)
    monkeypatch.setattr(
        huggingface_hub.HfApi, "model_info", lambda *_, **__: SimpleNamespace(siblings=files)
    )
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("downloaded")
    )
    with pytest.raises(
        BadInput, match=r"no \.safetensors file there; pickled weights are not loaded"
    ):
        resolve(node(), False)


def test_the_fingerprint_follows_config_and_weights(folder: Path) -> None:
    first = resolve(node(folder), False)[1].fingerprint
    copy = shutil.copytree(folder, folder.parent / "copy")
    assert resolve(node(copy), False)[1].fingerprint == first
    path = copy / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    assert resolve(node(copy), False)[1].fingerprint != first
    config = folder / "config.json"
    config.write_text(config.read_text().replace("1e-06", "1e-05"))
    assert resolve(node(folder), False)[1].fingerprint != first


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json"])
def test_the_fingerprint_follows_what_decides_prompts_and_ends(folder: Path, name: str) -> None:
    first = resolve(node(folder), False)[1].fingerprint
    held = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
    (folder / name).write_text(json.dumps({**held, "eos_token_id": [2, 5], "version": "another"}))
    assert resolve(node(folder), False)[1].fingerprint != first


def test_the_fingerprint_follows_the_tokenizer_that_is_read(folder: Path) -> None:
    def fingerprint(**files: str) -> str:
        for name, content in files.items():
            (folder / name.replace("_", ".")).write_text(content)
        return resolve(node(folder), False)[1].fingerprint

    bare = fingerprint()
    assert fingerprint(vocab_json='{"a": 0}') == bare  # no tokenizer yet
    pair = fingerprint(merges_txt="#version: 0.2")
    assert len({bare, pair, fingerprint(merges_txt="a b"), fingerprint(vocab_json='{"b": 0}')}) == 4
    assert fingerprint(tokenizer_json="{}") == fingerprint(merges_txt="b c") != bare


@pytest.mark.parametrize(
    "path", ["x" * 300, "/" + "x" * 300, "~/" + "x" * 300, "~nobody-of-this-name/x", "a\0b"]
)
@pytest.mark.parametrize("knob", ["path", "weights"])
def test_what_can_be_no_file_s_name_is_bad_input(path: str, knob: str, no_hub: None) -> None:
    with pytest.raises(BadInput, match=rf"model\.{knob}="):
        resolve(node(**{knob: path}), False)


def test_a_damaged_file_beside_a_checkpoint_says_nothing_of_it(folder: Path) -> None:
    (folder / "a.safetensors").write_bytes(b"cut short")
    shutil.copy(folder / SINGLE, folder / "b.safetensors")
    opened = Checkpoint.open(folder)
    assert opened.file_that_holds("model.norm.weight") == folder / "b.safetensors"
    assert opened.file_that_holds("model.nowhere") is None


def test_a_random_fingerprint_follows_architecture_and_seed() -> None:
    def fingerprint(**changes: Any) -> str:
        return resolve(node(weights="random", architecture=ARCHITECTURE) | changes, False)[
            1
        ].fingerprint

    assert fingerprint() == fingerprint(path="other/name", max_model_len=7)
    assert fingerprint() != fingerprint(seed=1)
    assert fingerprint() != fingerprint(architecture=ARCHITECTURE | {"num_hidden_layers": 5})
