"""Streamed rows come as a plain list of all of them would, wherever a run takes them up."""

import gc
import json
import os
import tracemalloc
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hdfs_native import Client
from hypothesis import given
from hypothesis import strategies as st
from support.models.tokenizers import char_tokenizer
from support.nightly import draws
from support.ranks.processes import run_ranks
from support.services.fault_proxy import Fault
from support.services.hub import HubServer, hub_variables, running_hub

from burnish.config.schema import DataConfig
from burnish.data.examples import ExampleDataset
from burnish.data.loader import order
from burnish.data.streaming import Stream, StreamedFile, StreamLoader, open_rows
from burnish.data.tasks import PromptDataset
from burnish.distributed.layout import Layout
from burnish.errors import IncompatibleError, MissingError, UsageError
from burnish.files.remote import Remote
from burnish.records.seeds import derive_seed

TOKENIZER = char_tokenizer()


def written(root: Path, files: list[list[int]], ending: str = "\n") -> list[str]:
    """JSON Lines with rows of these lengths, each with its file and number in it."""
    for number, lengths in enumerate(files):
        rows = [
            json.dumps({"prompt": f"{number}.{row}=", "completion": "x" * length})
            for row, length in enumerate(lengths)
        ]
        end = "" if number % 2 else ending  # the last line may have no end
        (root / f"{number}.jsonl").write_bytes((ending.join(rows) + end).encode())
    return [str(root)]


def streamed(paths: list[str], window: int, seed: int = 3, shuffle: bool = True):
    return open_rows(paths, "data.train", window, seed=seed, shuffle=shuffle)


def examples(paths: list[str], window: int, limit: int | None = None, **how) -> ExampleDataset:
    return ExampleDataset(streamed(paths, window, **how), TOKENIZER, DataConfig(), limit)


def text(example) -> str:
    return str(TOKENIZER.decode(example.token_ids)).partition("=")[0]


def expected(root: Path, window: int, epochs: int, seed: int = 3, shuffle: bool = True):
    """The same rows by a plain list: files end to end, cut where a window's bytes end, each part shuffled."""
    files = [path.read_bytes() for path in sorted(root.glob("*.jsonl")) if path.stat().st_size]
    found = []
    for epoch in range(epochs):
        ordered = [files[i] for i in order(seed, epoch, len(files))] if shuffle else files
        parts: list[list[bytes]] = [[] for _ in range(-(-sum(map(len, files)) // window))]
        start = 0
        for content in ordered:
            at = 0
            for line in content.splitlines(keepends=True):
                if line.strip():
                    parts[(start + at) // window].append(line)
                at += len(line)
            start += len(content)
        for number, part in enumerate(parts):
            mixed = order(derive_seed(seed, "window", epoch), number, len(part))
            found += [part[i] for i in mixed] if shuffle else part
    return [json.loads(line)["prompt"].rstrip("=") for line in found]


@draws(25, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 90), max_size=9), min_size=1, max_size=4),
    st.integers(30, 400),
    st.booleans(),
    st.sampled_from(["\n", "\r\n", "\n\n"]),
    st.lists(st.integers(0, 7), max_size=5),
)
def test_every_row_comes_once_an_epoch_in_the_order_of_a_plain_list(
    tmp_path_factory, files, window, shuffle, ending, counts
):
    """However many are taken at a time, and although each part is taken up by another loader."""
    root = tmp_path_factory.mktemp("rows")
    paths = written(root, files, ending)
    total = sum(map(len, files))
    if not total or not streamed_or_none(paths, window, shuffle):
        return
    state, taken = 0, []
    for count in [*counts, 2 * total]:
        stream = Stream([examples(paths, window, shuffle=shuffle)])
        loader = StreamLoader(stream, [])
        loader.state = state
        taken += [text(stream[index]) for index in loader.take(count)]
        state = loader.state
    wanted = expected(root, window, 3 + sum(counts) // total, shuffle=shuffle)
    assert taken == wanted[: len(taken)]
    assert sorted(taken[:total]) == sorted(wanted[:total])
    assert state[0] == len(taken)


def streamed_or_none(paths, window, shuffle):
    """The rows, unless none begins in the first window, which is refused."""
    try:
        return streamed(paths, window, shuffle=shuffle)
    except UsageError:
        return None


@pytest.mark.nightly
@pytest.mark.parametrize("service", ["s3_server", "gcs_server"])
def test_rows_of_an_object_store_come_as_those_of_a_directory(tmp_path, request, service):
    """Although it cuts an answer short and refuses another one."""
    server = request.getfixturevalue(service)
    paths = written(tmp_path, [[40, 3, 70] * 9, [5, 90] * 12])
    bucket = Remote(server.make_bucket(f"streamed-{os.getpid()}"))
    for path in tmp_path.glob("*.jsonl"):
        bucket.put(path.name, path.read_bytes())
    server.proxy.reset()
    server.proxy.faults.append(Fault("cut answer", 1, "GET", ".jsonl", after=50))
    server.proxy.faults.append(Fault("status", 1, "GET", ".jsonl"))
    found = []
    for where in (paths, [str(bucket)]):
        loader = StreamLoader(stream := Stream([examples(where, 1200)]), [])
        found.append([text(stream[index]) for index in loader.take(60)])
    assert found[0] == found[1] == expected(tmp_path, 1200, 2)[:60]
    assert {each.fault for each in server.proxy.asked if each.fault} == {
        "cut answer",
        "status",
    }


@pytest.mark.nightly
def test_rows_of_hdfs_come_as_those_of_a_directory(tmp_path, hdfs_server):
    """Although its data node dies meanwhile, and another directory looks the same."""
    written(tmp_path, [[40, 3, 70] * 9, [5, 90] * 12])
    here, other = (Remote(f"{hdfs_server.url}/{name}") for name in ("streamed", "other"))
    client = Client(hdfs_server.url)
    for path in tmp_path.glob("*.jsonl"):
        here.put(path.name, path.read_bytes())
        other.put(path.name, path.read_bytes()[::-1])
        for each in (here, other):
            client.set_times(f"/{each.url.path}/{path.name}", 10**12, 10**12)
    stream = Stream([examples([str(here)], 1200)])
    loader = StreamLoader(stream, [])
    taken = [text(stream[index]) for index in loader.take(20)]
    hdfs_server.kill("datanode")
    hdfs_server.start_later("datanode")
    taken += [text(stream[index]) for index in loader.take(40)]
    assert taken == expected(tmp_path, 1200, 2)[:60]
    two = Layout(local_world=2)
    how = {"seed": 3, "shuffle": True, "layout": two}
    shared = [open_rows([str(each)], "data.train", 10**6, **how).shared for each in (here, other)]
    assert shared[0] != shared[1]


def test_answers_in_another_column_are_told_once(tmp_path, caplog):
    rows = [{"prompt": "a=", "answer": "1"}, *[{"prompt": "b=", "solution": "2"}] * 3]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    stream = Stream([PromptDataset(streamed([str(path)], 400), TOKENIZER, DataConfig())])
    answers = [stream[index].answer for index in StreamLoader(stream, []).take(4)]
    assert sorted(answers, key=str) == ["1", None, None, None]
    assert [each for each in caplog.messages if "data.answer_column" in each] == caplog.messages[
        -1:
    ]


def test_row_groups_of_parquet_come_once_an_epoch(tmp_path):
    for number in range(3):
        table = pa.table({"prompt": [f"{number}.{row}=" for row in range(40)], "answer": [7] * 40})
        pq.write_table(table, tmp_path / f"{number}.parquet", row_group_size=6)
    rows = streamed([str(tmp_path)], 400)
    stream = Stream([PromptDataset(rows, TOKENIZER, DataConfig())])
    loader = StreamLoader(stream, [])
    first = [stream[index] for index in loader.take(120)]
    assert sorted(prompt.text for prompt in first) == sorted(
        f"{number}.{row}=" for number in range(3) for row in range(40)
    )
    assert {prompt.answer for prompt in first} == {7}
    again = [stream[index] for index in loader.take(120)]
    assert [prompt.text for prompt in again] != [prompt.text for prompt in first]
    names = {prompt.text: prompt.index for prompt in first}
    assert len(set(names.values())) == 120
    assert {prompt.text: prompt.index for prompt in again} == names
    half = StreamLoader(Stream([PromptDataset(rows, TOKENIZER, DataConfig())]), [])
    half.take(50)
    resumed = StreamLoader(stream, [])
    resumed.state = half.state
    assert [stream[i].text for i in resumed.take(70)] == [prompt.text for prompt in first[50:]]


@given(st.lists(st.integers(0, 9), max_size=6))
@draws(8, deadline=None)
def test_a_mixture_is_a_function_of_its_state(tmp_path_factory, counts):
    root = tmp_path_factory.mktemp("mixed")
    for name, sizes in (("a", [9, 30, 4] * 4), ("b", [60, 2] * 3)):
        (root / name).mkdir()
        written(root / name, [sizes, sizes])

    def mixed(state):
        stream = Stream([examples([str(root / name)], 150) for name in "ab"])
        loader = StreamLoader(stream, [3.0, 1.0])
        loader.state = state
        return stream, loader

    stream, loader = mixed(0)
    whole = [(index % 2, text(stream[index])) for index in loader.take(sum(counts) + 40)]
    state, taken = 0, []
    for count in [*counts, 40]:
        stream, loader = mixed(state)
        taken += [(index % 2, text(stream[index])) for index in loader.take(count)]
        state = loader.state
    assert taken == whole
    for number, name in enumerate("ab"):
        own = [each for source, each in whole if source == number]
        assert own == expected(root / name, 150, 9)[: len(own)]
    assert abs(sum(source for source, _ in whole) - len(whole) / 4) <= 1


def test_rows_that_cannot_be_used_are_left_out(tmp_path, caplog):
    lines = [{"prompt": f"{n}=", "completion": "x" * (50 if n % 5 == 0 else 1)} for n in range(300)]
    texts = [json.dumps(line) for line in lines]
    texts[200] = '{"prompt": '
    texts[201] = '{"prompt": "201=", "completion": 3}'
    texts[202] = '{"prompt": "202=", "completion": "\\ud800"}'
    texts[203] = '{"prompt": "203=", "prompt": "203=", "completion": "x"}'
    (tmp_path / "rows.jsonl").write_text("\n".join(texts))
    stream = Stream([examples([str(tmp_path)], 3000, limit=20, shuffle=False)])
    taken = [text(stream[index]) for index in StreamLoader(stream, []).take(236)]
    assert taken == [str(n) for n in range(300) if n % 5 and n not in (201, 202, 203)][:236]
    messages = [record.getMessage() for record in caplog.records]
    told = sum("left out" in each for each in messages)
    assert told == 3 + 3  # of three long rows, and of three broken ones


def test_rows_of_parquet_that_python_cannot_hold_are_left_out(tmp_path):
    """Text that is not UTF-8, and a date far away."""
    texts = pa.array([b"%d=" % n if n != 150 else b"\xff=" for n in range(200)], pa.binary())
    columns = {
        "prompt": pa.Array.from_buffers(pa.string(), 200, texts.buffers()),
        "completion": ["x"] * 200,
        "when": pa.array([2**62 if n == 160 else n for n in range(200)], pa.timestamp("us")),
    }
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    stream = Stream([examples([str(tmp_path)], 100_000, shuffle=False)])
    taken = [text(stream[index]) for index in StreamLoader(stream, []).take(198)]
    assert taken == [str(n) for n in range(200) if n not in (150, 160)]


@pytest.mark.parametrize("at", [4, 300])
def test_a_damaged_page_of_parquet_is_named(tmp_path, at):
    columns = {"prompt": [f"{n}=" for n in range(900)], "completion": ["x"] * 900}
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table(columns), path)
    content = bytearray(path.read_bytes())
    content[at : at + 30] = bytes(30)
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"rows\.parquet"):
        streamed([str(path)], 100_000)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_column_is_found_and_filled_where_rows_have_nothing_in_it(tmp_path, kind):
    rows = [
        {"prompt": f"{n}="} | ({"deep": {"answer": n}} if n % 9 == 8 else {}) for n in range(50)
    ]
    if kind == "parquet":
        columns = {name: [row.get(name) for row in rows] for name in ("prompt", "deep")}
        pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    else:
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = DataConfig(answer_column="deep.answer")
    stream = Stream(
        [PromptDataset(streamed([str(tmp_path)], 100_000, shuffle=False), TOKENIZER, data)]
    )
    taken = [stream[index] for index in StreamLoader(stream, []).take(50)]
    assert [prompt.answer for prompt in taken] == [n if n % 9 == 8 else None for n in range(50)]
    assert {tuple(prompt.columns) for prompt in taken} == {("prompt", "deep")}


def test_a_run_ends_where_nothing_can_be_read_any_more(tmp_path):
    good = [json.dumps({"prompt": f"{n}=", "completion": "x"}) for n in range(130)]
    (tmp_path / "rows.jsonl").write_text("\n".join(good + ["{}"] * 200))
    stream = Stream([examples([str(tmp_path)], 100_000, shuffle=False)])
    loader = StreamLoader(stream, [])
    loader.take(130)
    with pytest.raises(UsageError):
        loader.take(1)


ROW = '{"prompt": "1=", "completion": "2"}'


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("rows.json", each) for each in ("", "\n\n", f"[{ROW}]", ROW[:-2], '{"other": 1}')),
        ("rows.csv", ROW),
        ("rows.jsonl.gz", ROW),
    ],
)
@pytest.mark.parametrize("scheme", ["", "file://"])
def test_data_that_cannot_be_streamed_are_refused_before_the_first_step(
    tmp_path, name, content, scheme
):
    (tmp_path / name).write_text(content)
    with pytest.raises((UsageError, MissingError)):
        Stream([examples([f"{scheme}{tmp_path / name}"], 1000)])


def test_a_state_of_another_loader_is_refused(tmp_path):
    stream = Stream([examples(written(tmp_path, [[1, 2, 3]]), 1000)])
    loader = StreamLoader(stream, [])
    for state in (5, (5,), (5, 1, 2)):
        with pytest.raises(IncompatibleError):
            loader.state = state


def test_memory_and_disk_hold_a_part_of_what_is_streamed(tmp_path, monkeypatch):
    """40 MB come in windows of 1 MB, and no cache gets a file."""
    for name in ("BURNISH_CACHE", "HF_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    line = json.dumps({"prompt": "1=", "completion": "x" * 9_960}) + "\n"
    data = tmp_path / "data"
    data.mkdir()
    for number in range(4):
        (data / f"{number}.jsonl").write_text(line * 1000)
    rows = streamed([f"file://{data}"], 1_000_000)
    gc.collect()
    tracemalloc.start()
    lengths = [
        len(rows[number << 32 | row]["completion"])
        for number in range(rows.windows)
        for row in range(len(rows.window(number, ahead=True)))
    ]
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert lengths == [9_960] * 4000
    assert most < 12_000_000
    assert not (tmp_path / "cache").exists()


def test_processes_of_a_machine_share_what_one_has_fetched(tmp_path, monkeypatch):
    """The cache holds three windows at most, and what it holds is not fetched again."""
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "data"
    data.mkdir()
    paths = written(data, [[30] * 8] * 5)
    first, second, third = (
        replace(streamed(paths, 500), shared="mine", _fetching={}, _read={}) for _ in range(3)
    )
    (tmp_path / "cache" / "streams").mkdir(parents=True)
    old = tmp_path / "cache" / "streams" / "others-7"
    old.touch()
    os.utime(old, (0, 0))
    for number in range(first.windows):
        first.window(number)
        second.window(number)
    left = {path.name for path in old.parent.glob("mine-*") if path.suffix != ".lock"}
    assert left == {f"mine-{first.windows - 1}", f"mine-{first.windows - 2}"}
    assert not old.exists()
    last, reads, read = first.windows - 1, set(), StreamedFile.read
    spans = {(file.name, *span) for file, *span in first._parts(last)}

    def noting(file, begin, end):
        reads.add((file.name, begin, end))
        return read(file, begin, end)

    monkeypatch.setattr(StreamedFile, "read", noting)
    assert len(third.window(last)) == len(first.window(last)) > 0
    assert not reads & spans
    streamed(paths, 500).window(last)
    assert spans <= reads


def test_a_source_of_one_window_is_fetched_once(tmp_path, monkeypatch):
    stream = Stream([examples(written(tmp_path, [[30] * 8, [30] * 5]), 10_000)])
    loader, plain = StreamLoader(stream, []), expected(tmp_path, 10_000, 3)
    read = Mock(side_effect=AssertionError("it was read again"))
    monkeypatch.setattr(StreamedFile, "read", read)
    assert [text(stream[index]) for index in loader.take(39)] == plain


@pytest.fixture
def hub(tmp_path):
    rows = [{"prompt": f"{n}=", "completion": "x" * (n % 7 + 1)} for n in range(400)]
    table = pa.Table.from_pylist(rows[200:])
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=20)
    files = {
        "data/train-0.jsonl": "".join(json.dumps(row) + "\n" for row in rows[:200]).encode(),
        "more/train-1.parquet": sink.getvalue().to_pybytes(),
    }
    with running_hub({"datasets/some/sums": files}) as server:
        home = {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "0"}
        with hub_variables(**home):
            yield server


@pytest.mark.nightly
def test_the_hub_is_read_in_ranges_and_asked_again(hub: HubServer, tmp_path):
    entries = ["hf://datasets/some/sums/data", "hf://datasets/some/sums/more"]
    stream = Stream([examples(entries, 2000)])
    loader = StreamLoader(stream, [])
    hub.failures = 2
    taken = [text(stream[index]) for index in loader.take(400)]
    assert sorted(taken, key=int) == [str(n) for n in range(400)]
    held = [path.name for path in (tmp_path / "hub").rglob("*") if path.is_file()]
    assert not [name for name in held if name.endswith((".jsonl", ".parquet"))]


def _first(layout, paths):
    rows = open_rows(paths, "data.train", 200, seed=3, shuffle=True, layout=layout)
    stream = Stream([ExampleDataset(rows, TOKENIZER, DataConfig(), None, None, layout)])
    return rows.digest, [text(stream[index]) for index in StreamLoader(stream, []).take(30)]


def test_all_ranks_have_the_same_rows(tmp_path):
    paths = written(tmp_path, [[1] * 9, [20] * 9])
    told = run_ranks(_first, 2, paths)
    assert told[0] == told[1]
    assert told[0][1] == expected(tmp_path, 200, 3)[:30]


def test_other_files_have_another_digest(tmp_path):
    paths = written(tmp_path, [[1] * 9, [20] * 9])
    before = streamed(paths, 100).digest
    assert streamed(paths, 200).digest == before
    np.testing.assert_equal(streamed(paths, 100)[0], streamed(paths, 100)[0])
    (tmp_path / "1.jsonl").unlink()
    assert streamed(paths, 100).digest != before
