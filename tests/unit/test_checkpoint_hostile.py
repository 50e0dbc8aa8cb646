"""Untrusted folders: refused by name with every reason, never executed, never followed outside, never written to.

Formats of attack: public reports on model files, and the checks of safetensors' own reader (``Metadata::validate``).
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.checkpoint import headers
from lockstep.checkpoint.errors import CheckpointError, Problem, described, shown
from lockstep.checkpoint.headers import read_checkpoint
from lockstep.checkpoint.inspect import inspect
from lockstep.checkpoint.strict_json import open_regular
from tests.synthetic_checkpoints import write_checkpoint

TINY: dict[str, Any] = {
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "vocab_size": 11,
}
INDEX = "model.safetensors.index.json"
SHARD = "model-00001-of-00002.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sound checkpoint in two files."""
    return write_checkpoint(tmp_path / "model", "llama", num_shards=2, **TINY)


def snapshot(folder: Path) -> dict[str, Any]:
    """Everything in a folder: what it is, its bytes, when it was last changed."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        state = path.lstat()
        small = path.is_file() and not path.is_symlink() and state.st_size < 1 << 20
        content = path.read_bytes() if small else b""
        found[str(path.relative_to(folder))] = (state.st_mode, state.st_size, state.st_mtime_ns, content)
    return found


def refusal(folder: Path) -> str:
    """Why a folder is refused: by reading and by validating alike, with nothing changed in it."""
    before = snapshot(folder)
    with pytest.raises(CheckpointError) as error:
        read_checkpoint(folder)
    report = inspect(folder)
    assert not report.ok
    assert set(error.value.problems) <= set(report.problems)
    with pytest.raises(CheckpointError):
        report.checked()
    assert snapshot(folder) == before
    text = str(error.value)
    assert all(line.isprintable() for line in text.splitlines())
    assert len(text.splitlines()) < 300
    return text


def split(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def join(path: Path, header: Any, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def edit_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    header, data = split(path)
    change(header)
    join(path, header, data)


def edit_index(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def test_the_sound_folder_is_accepted_and_not_touched(folder: Path) -> None:
    before = snapshot(folder)
    index = read_checkpoint(folder)
    assert inspect(folder).ok
    assert snapshot(folder) == before
    entry = index.tensors["model.norm.weight"]
    assert (entry.dtype, entry.shape, entry.end - entry.begin) == ("BF16", (8,), 16)


# --- what lies in the folder ------------------------------------------------------------------------------------------


class Trap:
    """Unpickling it leaves a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt", "last.ckpt", "optimizer.PKL"])
def test_a_pickle_is_refused_by_name_and_never_loaded(name: str, folder: Path, tmp_path: Path) -> None:
    (folder / name).write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    text = refusal(folder)
    assert name in text
    assert "never loaded" in text
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("name", ["modeling_custom.py", "kernels.so", "tokenizer.pyc"])
def test_code_beside_the_weights_is_refused_by_name(name: str, folder: Path) -> None:
    (folder / name).write_text("raise SystemExit('ran')")
    assert name in refusal(folder)


def test_code_and_pickles_in_subfolders_are_neither_read_nor_a_reason(folder: Path) -> None:
    """Official repositories keep their reference code in ``inference/`` and converted copies in ``original/``."""
    (folder / "inference").mkdir()
    (folder / "inference" / "model.py").write_text("raise SystemExit('ran')")
    (folder / "inference" / "consolidated.pth").write_bytes(b"")
    assert inspect(folder).ok


@pytest.mark.parametrize(
    ("file", "content", "place"),
    [
        ("config.json", {"auto_map": {"AutoModel": "modeling.Model"}}, "auto_map"),
        ("config.json", {"text_config": {"auto_map": {}}}, "text_config.auto_map"),
        ("config.json", {"layers": [{"trust_remote_code": True}]}, "layers[0].trust_remote_code"),
        ("config.json", {"custom_pipelines": {"p": {"impl": "x.P"}}}, "custom_pipelines"),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["t.T", None]}}, "auto_map"),
        ("video_preprocessor_config.json", {"auto_map": {"AutoProcessor": "p.P"}}, "auto_map"),
    ],
)
def test_a_configuration_that_asks_for_code_is_refused(file: str, content: Any, place: str, folder: Path) -> None:
    stated = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
    (folder / file).write_text(json.dumps({**stated, **content}))
    text = refusal(folder)
    assert f"{file}: {place} makes a loader run code" in text


@pytest.mark.parametrize("name", ["config.json", INDEX, SHARD, "tokenizer.json"])
def test_a_link_out_of_the_folder_is_refused_whatever_it_is_called(name: str, folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / f"outside-{name}"
    if (folder / name).exists():
        (folder / name).rename(outside)
    else:
        outside.write_text("{}")
    (folder / name).symlink_to(outside)
    text = refusal(folder)
    assert f"{name}: replace the link" in text


def test_links_within_the_folder_and_into_the_hubs_cache_are_followed(folder: Path, tmp_path: Path) -> None:
    (folder / SHARD).rename(folder / "real")
    (folder / SHARD).symlink_to("real")
    assert inspect(folder).ok
    snapshot_folder = tmp_path / "models--a--b" / "snapshots" / "0123abc"
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir(parents=True)
    snapshot_folder.mkdir(parents=True)
    for number, name in enumerate(("config.json", INDEX, SHARD, SHARD.replace("00001-", "00002-"))):
        (blobs / f"digest{number}").write_bytes((folder / name).read_bytes())
        (snapshot_folder / name).symlink_to(f"../../blobs/digest{number}")
    assert inspect(snapshot_folder).ok
    (blobs / "digest2").unlink()
    (blobs / "digest2").symlink_to(folder / SHARD)
    assert f"{SHARD}: replace the link" in refusal(snapshot_folder)


def test_links_that_lead_nowhere_or_in_a_circle_are_refused(folder: Path) -> None:
    (folder / "a.json").symlink_to("b.json")
    (folder / "b.json").symlink_to("a.json")
    (folder / "c.safetensors").symlink_to("gone")
    text = refusal(folder)
    assert all(f"{name} leads nowhere" in text for name in ("a.json", "b.json", "c.safetensors"))


def test_pipes_and_sockets_are_refused_without_waiting_for_them(folder: Path) -> None:
    (folder / SHARD).unlink()
    os.mkfifo(folder / SHARD)
    (folder / "config.json").unlink()
    here = os.getcwd()
    os.chdir(folder)  # a socket's path has at most some 100 characters
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("config.json")
    finally:
        os.chdir(here)
    text = refusal(folder)
    assert f"{SHARD} is a pipe" in text
    assert "config.json is a pipe, a socket" in text


def test_a_file_that_became_a_pipe_or_a_link_after_the_listing_is_not_opened(tmp_path: Path) -> None:
    """What is opened is asked again, for it may have been exchanged meanwhile; a pipe would be waited for."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_text("{}")
    (tmp_path / "link").symlink_to("file")
    raised: list[str] = []

    def read() -> None:
        for name in ("pipe", "link", "."):
            try:
                open_regular(tmp_path / name)
            except OSError as error:
                raised.append(f"{name}: {error}")

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(timeout=10)
    assert not reader.is_alive(), "it waits for the pipe's writer"
    assert len(raised) == 3
    assert raised[0] == "pipe: pipe is no regular file"
    os.close(open_regular(tmp_path / "file"))


def test_a_folder_that_is_none_is_an_error_and_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(CheckpointError, match="no checkpoint folder"):
            read_checkpoint(path)
        assert not inspect(path).ok
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError) as error:
        read_checkpoint(tmp_path / "empty")
    assert "config.json is needed" in str(error.value)
    assert "exactly one model.safetensors" in str(error.value)


# --- the index --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "file", ["../outside.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "a\\b.safetensors", "x.bin", 3, None]
)
def test_an_index_that_names_a_file_elsewhere_is_refused(file: Any, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "outside.safetensors").write_bytes((folder / SHARD).read_bytes())
    edit_index(folder, lambda index: index["weight_map"].update({"model.norm.weight": file}))
    text = refusal(folder)
    assert "index names a file outside the folder" in text
    assert "model.norm.weight" in text


@pytest.mark.parametrize("value", [None, [], {}, "x", 3])
def test_an_index_without_a_map_is_refused(value: Any, folder: Path) -> None:
    edit_index(folder, lambda index: index.update(weight_map=value))
    assert "weight_map must be an object" in refusal(folder)


def test_index_and_files_must_agree_both_ways(folder: Path) -> None:
    other = SHARD.replace("00001-", "00002-")

    def change(index: dict[str, Any]) -> None:
        del index["weight_map"]["model.norm.weight"]
        index["weight_map"]["model.ghost.weight"] = SHARD
        index["weight_map"]["model.embed_tokens.weight"] = other

    edit_index(folder, change)
    text = refusal(folder)
    assert f"model.norm.weight is in {SHARD}; {INDEX} has it in no file" in text
    assert f"model.ghost.weight isn't in {SHARD}" in text
    assert f"model.embed_tokens.weight is in {SHARD}; {INDEX} has it in {other}" in text


def test_files_that_are_missing_or_that_no_index_names_are_refused(folder: Path) -> None:
    (folder / SHARD).rename(folder / "stray.safetensors")
    text = refusal(folder)
    assert f"{SHARD} is named by {INDEX}" in text
    assert "stray.safetensors: remove it" in text


def test_sizes_must_add_up_where_the_index_states_them(folder: Path) -> None:
    edit_index(folder, lambda index: index["metadata"].update(total_size=index["metadata"]["total_size"] + 1))
    assert "metadata.total_size is" in refusal(folder)
    in_files = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    edit_index(folder, lambda index: index["metadata"].update(total_size=in_files))
    assert inspect(folder).ok, "DeepSeek's index counts the headers"
    edit_index(folder, lambda index: index.pop("metadata"))
    assert inspect(folder).ok
    edit_index(folder, lambda index: index.update(metadata=[]))
    assert "metadata must be an object" in refusal(folder)


def test_a_tensor_in_two_files_is_refused(folder: Path) -> None:
    header, data = split(folder / SHARD)
    join(folder / "extra.safetensors", header, data)
    edit_index(folder, lambda index: index["weight_map"].update({"model.ghost": "extra.safetensors"}))
    assert "tensor in two files" in refusal(folder)
    texts = [problem.text for problem in inspect(folder).problems]
    assert f"model.norm.weight is in extra.safetensors and in {SHARD}" in texts


# --- headers ----------------------------------------------------------------------------------------------------------


def test_a_huge_header_is_refused_before_it_is_read(folder: Path) -> None:
    path = folder / SHARD
    path.write_bytes(struct.pack("<Q", 1 << 62) + path.read_bytes()[8:])
    assert "at most" in refusal(folder)
    with path.open("wb") as file:  # sparse: 40 GB of nothing, of which the header claims 20
        file.write(struct.pack("<Q", 20 << 30))
        file.truncate(40 << 30)
    assert "at most 33554432 can be" in refusal(folder)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 20])
def test_a_file_that_is_cut_anywhere_is_refused(size: int, folder: Path) -> None:
    (folder / SHARD).write_bytes((folder / SHARD).read_bytes()[:size])
    assert SHARD in refusal(folder)


def test_a_file_that_lacks_or_has_a_byte_of_data_is_refused(folder: Path) -> None:
    data = (folder / SHARD).read_bytes()
    (folder / SHARD).write_bytes(data[:-1])
    assert "lie outside" in refusal(folder)
    (folder / SHARD).write_bytes(data + b"\0")
    assert "1 bytes after the last tensor belong to none" in refusal(folder)


def test_duplicate_keys_are_refused_in_every_json(folder: Path) -> None:
    header, data = split(folder / SHARD)
    text = json.dumps(header)
    name, fields = next((n, f) for n, f in header.items() if n != "__metadata__")
    join(folder / SHARD, (text[:-1] + f", {json.dumps(name)}: {json.dumps(fields)}}}").encode(), data)
    assert "duplicate keys" in refusal(folder)
    join(folder / SHARD, text.replace('"dtype": "BF16"', '"dtype": "F32", "dtype": "BF16"', 1).encode(), data)
    assert "duplicate keys: dtype" in refusal(folder)
    join(folder / SHARD, header, data)
    for file in ("config.json", INDEX):
        before = (folder / file).read_text()
        (folder / file).write_text(before.rstrip()[:-1] + ', "model_type": 1, "model_type": 2}')
        assert "duplicate keys: model_type" in refusal(folder)
        (folder / file).write_text(before)


def test_overlaps_gaps_and_backward_offsets_are_refused(folder: Path) -> None:
    header, data = split(folder / SHARD)
    names = sorted((n for n in header if n != "__metadata__"), key=lambda n: header[n]["data_offsets"])
    first, second = header[names[0]], header[names[1]]
    size = second["data_offsets"][1] - second["data_offsets"][0]

    def moved(begin: int) -> dict[str, Any]:
        return {**header, names[1]: {**second, "data_offsets": [begin, begin + size]}}

    join(folder / SHARD, moved(first["data_offsets"][1] - 2), data)
    assert f"{names[1]} begins at byte" in (text := refusal(folder))
    assert "overlaps" in text
    join(folder / SHARD, moved(second["data_offsets"][0] + 2), data)
    assert "leaves a gap after" in refusal(folder)
    join(folder / SHARD, {**header, names[1]: {**second, "data_offsets": second["data_offsets"][::-1]}}, data)
    assert "lie outside" in refusal(folder)
    join(folder / SHARD, {n: f for n, f in header.items() if n != names[1]}, data)
    assert "leaves a gap" in refusal(folder)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"dtype": "F65"}, "dtype F65 is unknown"),
        ({"dtype": ["BF16"]}, "is unknown"),
        ({"shape": [8, -1]}, "no list of"),
        ({"shape": [True, 8]}, "no list of"),
        ({"shape": [8.0]}, "no list of"),
        ({"shape": [1 << 62] * 4}, "bytes, not"),
        ({"shape": [1] * 17}, "no list of"),
        ({"shape": [1 << 63, 0]}, "no list of"),
        ({"shape": "8"}, "no list of"),
        ({"data_offsets": [0]}, "no pair"),
        ({"data_offsets": [0, 1 << 70]}, "no pair"),
        ({"data_offsets": [0, 1 << 40]}, "lie outside"),
        ({"data_offsets": None}, "no pair"),
        ({"extra": 1}, "nothing else"),
    ],
)
def test_entries_are_checked_field_by_field(fields: dict[str, Any], why: str, folder: Path) -> None:
    edit_header(folder / SHARD, lambda header: header["model.norm.weight"].update(fields))
    text = refusal(folder)
    assert f"{SHARD}: model.norm.weight: " in text
    assert why in text


@pytest.mark.parametrize("name", ["", "a b", "new\nline", "\x1b[2J", "\ud800", "x" * 513])
def test_names_that_no_tensor_has_are_refused_and_escaped(name: str, folder: Path) -> None:
    edit_header(folder / SHARD, lambda header: header.update({name: header.pop("model.norm.weight")}))
    text = refusal(folder)
    assert "a name has 1 to 512 printable characters" in text
    assert "\x1b" not in text


@pytest.mark.parametrize(
    "header",
    [b"[]", b'"x"', b"{", b"{}x", b"\xff\xfe", b'{"a": NaN}', b"[" * 100_000, b'{"a":' * 50_000, b"1" * 5000, b""],
)
def test_a_header_that_is_no_object_is_refused(header: bytes, folder: Path) -> None:
    join(folder / SHARD, header, b"")
    assert SHARD in refusal(folder)


def test_nested_and_endless_json_in_a_configuration_is_refused(folder: Path) -> None:
    deep = [b'{"a":' * depth + b"1" + b"}" * depth for depth in (65, 500, 900)]
    for content in (*deep, b'{"a":' * 100_000, b'{"a": ' + b"9" * 5000 + b"}", b'{"a": Infinity}', b"\xc3\x28", b"[]"):
        (folder / "config.json").write_bytes(content)
        assert "config.json is refused" in refusal(folder)
    with (folder / "config.json").open("wb") as file:
        file.truncate(1 << 40)
    assert "which no real one is" in refusal(folder)


def test_metadata_must_be_text(folder: Path) -> None:
    edit_header(folder / SHARD, lambda header: header.update(__metadata__={"format": ["pt"]}))
    assert "__metadata__ must map text to text" in refusal(folder)


def test_a_configuration_of_a_billion_layers_is_refused_at_once(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=10**9)
    text = inspect(folder).text()
    assert "num_hidden_layers: 1000000000 is no integer from 1 to 4096" in text
    write_checkpoint(folder, "qwen3_moe", num_shards=2)
    edit_config(folder, num_hidden_layers=4096, num_experts=2**31)
    assert "no model has" in inspect(folder).text()


def test_a_folder_of_endless_tensors_is_refused_before_all_of_them_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(headers, "MAX_TENSORS", 7)
    assert "more than 7; no model has as many" in refusal(folder)
    monkeypatch.setattr(headers, "MAX_TENSORS", 12)
    assert inspect(folder).ok


def test_thousands_of_problems_make_a_short_text_and_a_whole_list() -> None:
    problems = [Problem(f"kind {n % 60}", "x" * 300) for n in range(60_000)]
    error = CheckpointError("folder", problems)
    assert len(error.problems) == 60_000
    text = str(error)
    assert "60000 problems" in text
    assert "and 995 more" in text
    assert "and 20 more kinds" in text
    assert len(text.splitlines()) < 300
    assert len(shown("é\u202e" * 1000)) < 300
    assert described([]) == ""


# --- any change -------------------------------------------------------------------------------------------------------

ANY = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SCALARS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8)
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound checkpoint that property tests change and restore."""
    return write_checkpoint(tmp_path_factory.mktemp("sound"), "llama", num_shards=2, **TINY)


def entries_of(data: bytes) -> Any:
    """What a header means: its entries, without the free text of its metadata; None if it is not read."""
    try:
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        header.pop("__metadata__", None)
    except (ValueError, struct.error, AttributeError, RecursionError):
        return None
    return header, data[8 + length :]


@ANY
@given(position=st.integers(0, 10**6), value=st.integers(0, 255))
def test_any_byte_of_a_header_may_change_and_is_noticed_if_it_means_something(
    position: int, value: int, sound: Path
) -> None:
    before = (sound / SHARD).read_bytes()
    end = 8 + struct.unpack("<Q", before[:8])[0]
    changed = bytearray(before)
    changed[position % end] = value
    try:
        (sound / SHARD).write_bytes(changed)
        report = inspect(sound)
        if entries_of(bytes(changed)) != entries_of(before):
            assert not report.ok, changed[:end]
    finally:
        (sound / SHARD).write_bytes(before)


@ANY
@given(data=st.data())
def test_any_change_of_an_entry_is_a_problem_and_never_a_crash(data: st.DataObject, sound: Path) -> None:
    before = (sound / SHARD).read_bytes()
    header, payload = split(sound / SHARD)
    name = data.draw(st.sampled_from(sorted(set(header) - {"__metadata__"})))
    key = data.draw(st.sampled_from(["dtype", "shape", "data_offsets", "remove", "rename", "replace"]))
    changed = json.loads(json.dumps(header))
    if key == "remove":
        del changed[name]
    elif key == "rename":
        changed[data.draw(st.text(max_size=20))] = changed.pop(name)
    elif key == "replace":
        changed[name] = data.draw(JSON)
    else:
        number = st.integers(-1, 300)
        values = {"dtype": st.sampled_from(sorted(headers.DTYPE_BITS)) | SCALARS, "shape": st.lists(number, max_size=3)}
        changed[name][key] = data.draw(values.get(key, st.lists(number, min_size=2, max_size=2)) | JSON)
    try:
        join(sound / SHARD, changed, payload)
        same = json.dumps(changed, sort_keys=True) == json.dumps(header, sort_keys=True)
        assert inspect(sound).ok == same
        if not same:
            with pytest.raises(CheckpointError):
                inspect(sound).checked()
    finally:
        (sound / SHARD).write_bytes(before)


@ANY
@given(data=st.data())
def test_any_configuration_is_judged_without_a_crash(data: st.DataObject, sound: Path) -> None:
    path = sound / "config.json"
    before = path.read_text()
    config = json.loads(before)
    for key in data.draw(st.lists(st.sampled_from(sorted(config)), min_size=1, max_size=4, unique=True)):
        config[key] = data.draw(JSON)
    families = ("llama", "qwen3_moe", "glm_moe_dsa", "deepseek_v4", "inkling_mm_model", "inkling_text")
    config["model_type"] = data.draw(st.sampled_from(families))
    for key in data.draw(st.lists(st.sampled_from(FREE_KEYS), max_size=5, unique=True)):
        config[key] = data.draw(JSON)
    try:
        path.write_text(json.dumps(config))
        report = inspect(sound)
        assert len(report.text().splitlines()) < 300
        json.dumps(report.as_json())
    finally:
        path.write_text(before)


FREE_KEYS = (
    *("text_config", "mtp_config", "audio_config", "vision_config", "quantization_config", "expert_dtype", "dtype"),
    *("layer_types", "mlp_layer_types", "indexer_types", "compress_ratios", "compress_rates", "local_layer_ids"),
    *("num_nextn_predict_layers", "index_topk_pattern", "index_topk_freq", "first_k_dense_replace", "n_routed_experts"),
    *("rope_parameters", "rope_scaling", "tie_word_embeddings", "architectures", "o_groups", "hc_mult"),
)


@ANY
@given(data=st.data())
def test_any_index_is_judged_without_a_crash_and_a_changed_map_is_noticed(data: st.DataObject, sound: Path) -> None:
    path = sound / INDEX
    before = path.read_text()
    index = json.loads(before)
    name = data.draw(st.sampled_from(sorted(index["weight_map"])))
    index["weight_map"][name] = data.draw(JSON | st.sampled_from([SHARD, SHARD.replace("00001-", "00002-")]))
    try:
        path.write_text(json.dumps(index))
        assert inspect(sound).ok == (index == json.loads(before))
    finally:
        path.write_text(before)
