import fcntl
import json
import logging
import os
import socket
import sys
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from burnish.data import sources
from burnish.data.sources import load_rows
from burnish.errors import MissingError, UsageError


def test_reads_json_lines_with_random_access(write):
    rows = load_rows([write("a.jsonl", '{"x": 1}\n\n{"x": 2, "y": "b"}\n')])
    assert len(rows) == 2
    assert rows[1] == {"x": 2, "y": "b"}
    assert rows[0] == {"x": 1, "y": None}
    assert rows.span(0, 2) == [rows[0], rows[1]]
    assert rows.columns == ["x", "y"]


def test_files_that_another_process_converts_at_the_same_time_are_read(write, monkeypatch):
    path, lock, earlier = write("a.jsonl", '{"x": 1}\n'), fcntl.flock, []

    def second(file, operation):
        if not earlier:
            earlier.append(None)
            earlier.append(load_rows([path])[0])
        lock(file, operation)

    monkeypatch.setattr("burnish.files.lease.fcntl.flock", second)
    assert load_rows([path])[0] == earlier[1] == {"x": 1}


def test_the_table_lies_on_disk_and_not_in_memory(write, tmp_path):
    rows = load_rows([write("a.jsonl", '{"x": 1}\n')])
    assert isinstance(rows.table, datasets.Dataset)
    files = [entry["filename"] for entry in rows.table.cache_files]
    assert files
    assert all(name.startswith(str(tmp_path / "cache")) for name in files)


def test_what_json_says_is_what_a_row_holds(write):
    """Not a date where a text looks like one, nor a number where another row has one."""
    content = [
        {"prompt": "a", "answer": "007", "day": "2024-01-01", "calls": [{"x": 1, "on": "2024-01-01"}]},
        {"prompt": "b", "answer": 5, "day": "2024-01-02", "calls": [{"x": "s", "on": "2024-01-02"}]},
        {"prompt": "c", "answer": "null", "day": "2024-01-03", "calls": []},
    ]  # fmt: skip
    rows = load_rows([write("a.jsonl", "".join(json.dumps(row) + "\n" for row in content))])
    assert rows.span(0, 3) == content
    assert rows.columns == ["prompt", "answer", "day", "calls"]
    dates = [{"day": row["day"]} for row in content]
    assert load_rows([write("b.json", json.dumps(dates, indent=1))]).span(0, 3) == dates


VALUES = [1, 0.5, True, "x", "007", "2024-01-01", None, [1], ["2"], [], {"k": 1}, {"z": "1"}]


@pytest.mark.parametrize("value", [1, 0.5, "x", None, ["2"], {"k": 1}])
def test_what_json_says_is_what_a_row_holds_whatever_comes_first(write, value):
    """Not what other rows or files hold."""

    for number, other in enumerate(VALUES):
        is_one_file = number % 3 == 0
        content = [{"a": value, "b": [1.0]}, {"b": [0.5, number], "a": other, "new": "2024-01-01"}]
        lines = [json.dumps(row) + "\n" for row in content]
        texts = ["".join(lines)] if is_one_file else lines
        found = load_rows([write(f"{number}/{i}.jsonl", text) for i, text in enumerate(texts)])
        assert repr(found.span(0, 2)) == repr(
            [content[0] | {"new": None}, {"a": other, "b": [0.5, number], "new": "2024-01-01"}]
        )


def test_whole_numbers_stay_whole_beside_others(write):
    """Also those that no float holds."""
    content = [{"x": 2**53 + 1}, {"x": 0.5}, {"x": 10**30}, {"x": 1.0}, {"x": -(2**63) - 1}]
    path = write("a.jsonl", "".join(json.dumps(row) + "\n" for row in content))
    for _ in range(2):  # from files, then from the cache
        assert repr(load_rows([path]).span(0, 5)) == repr(content)


def test_reads_parquet_with_nested_columns(tmp_path):
    path = tmp_path / "rl.parquet"
    content = [
        {"prompt": [{"role": "user", "content": "hi"}], "reward_model": {"ground_truth": "4"}}
    ]
    pq.write_table(pa.Table.from_pylist(content), path)
    assert load_rows([str(path)])[0] == content[0]


def test_reads_directories_patterns_and_lists_in_order(write, tmp_path):
    for index in (2, 0, 1):
        write(f"part/{index}.jsonl", f'{{"x": {index}}}\n')
    last = write("last.json", '{"x": 9}\n')
    write("part/notes.txt", "not data")
    by_directory = load_rows([str(tmp_path / "part"), last])
    by_pattern = load_rows([str(tmp_path / "*" / "[0-2].jsonl"), last])
    for rows in (by_directory, by_pattern):
        assert [row["x"] for row in rows.span(0, len(rows))] == [0, 1, 2, 9]


def test_a_path_with_pattern_characters_is_read_as_it_is(write):
    assert len(load_rows([write("run[1]/a?.jsonl", '{"x": 1}\n')])) == 1


def test_a_changed_file_is_read_again(write):
    path = write("a.jsonl", '{"x": 1}\n')
    load_rows([path])
    write("a.jsonl", '{"x": 2}\n')
    os.utime(path, (1, 1))
    assert load_rows([path])[0] == {"x": 2}


def test_a_changed_file_with_its_old_size_and_time_is_read_again(write, tmp_path):
    """Written over, renamed over, and copied with its time, as `cp -p` and `rsync -t` do."""
    path = write("a.jsonl", '{"x": 1}\n')
    os.utime(path, (1, 1))
    assert load_rows([path])[0] == {"x": 1}
    write("a.jsonl", '{"x": 2}\n')
    os.utime(path, (1, 1))
    assert load_rows([path])[0] == {"x": 2}
    other = write("b.jsonl", '{"x": 3}\n')
    os.utime(other, (1, 1))
    os.replace(other, path)
    assert load_rows([path])[0] == {"x": 3}
    table = tmp_path / "a.parquet"
    for x in (1, 2):
        pq.write_table(pa.Table.from_pylist([{"x": x}]), table)
        os.utime(table, (1, 1))
        assert load_rows([str(table)])[0] == {"x": x}


def test_a_file_that_changes_while_it_is_read_is_refused(write, monkeypatch):
    path = write("a.jsonl", '{"x": 1}\n')
    as_it_was = sources._read

    def read(*arguments):
        write("a.jsonl", '{"x": 2}\n')
        return as_it_was(*arguments)

    monkeypatch.setattr(sources, "_read", read)
    with pytest.raises(UsageError, match=r"a\.jsonl"):
        load_rows([path])
    monkeypatch.undo()
    assert load_rows([path])[0] == {"x": 2}


def test_damaged_arrow_files_are_made_again(write, monkeypatch):
    path = write("a.jsonl", "".join(f'{{"x": "{number:0100}"}}\n' for number in range(100)))
    first = load_rows([path])
    content = first.span(0, 100)
    (entry,) = first.table.cache_files
    sound = Path(entry["filename"]).read_bytes()
    for damaged in (b"", sound[: len(sound) // 2], sound[:9000] + bytes(len(sound) - 9000)):
        Path(entry["filename"]).unlink()  # `first` may still be read
        Path(entry["filename"]).write_bytes(damaged)
        again = load_rows([path])
        assert again.span(0, 100) == content
        assert again.digest == first.digest
    monkeypatch.setattr(sources, "_content", None)  # what is sound is not read to check it
    assert load_rows([path]).digest == first.digest


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(UsageError, match=r"a\.jsonl"):
        load_rows([str(tmp_path / "a.jsonl")])


def test_rows_that_look_like_agent_logs_stay_as_they_are(write):
    line = '{"id": "1", "source": "s", "model": "m", "system_prompt": "p", "messages": [{"role": "user"}]}'
    rows = load_rows([write("a.jsonl", line + "\n")])
    assert sorted(rows.columns) == ["id", "messages", "model", "source", "system_prompt"]


def test_reading_is_silent_and_asks_no_network(write, monkeypatch, capfd, caplog):
    def refuse(*_args, **_kwargs):
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    # A bar is drawn only on a terminal.
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    before = datasets.logging.get_verbosity(), datasets.are_progress_bars_disabled()
    with caplog.at_level(logging.DEBUG):
        load_rows([write("a.jsonl", '{"x": 1}\n')])
        with pytest.raises(UsageError):
            load_rows([write("b.jsonl", "nonsense\n")])
    out, err = capfd.readouterr()
    assert out == ""
    assert err == ""
    assert not [
        r for r in caplog.records if r.name.startswith("datasets") and r.levelno > logging.INFO
    ]
    assert (datasets.logging.get_verbosity(), datasets.are_progress_bars_disabled()) == before


@pytest.mark.parametrize(
    ("text", "line", "excerpt"),
    [
        ('{"x": 1}\n{"x": 2\n{"x": 3}\n', 2, '{"x": 2'),
        ('{"x": 1}\n\n{"x": 2}\n{"x": ', 4, '{"x":'),
        ("oops\n", 1, "oops"),
        ('{"x": "1\n', 1, '{"x": "1'),
        ('{"x": 1}\n3\n', 2, "3"),
        ('"a"\n"b"\n', 1, "a"),
        ('{"x": 1}\n{"x": 1, "x": 2}\n', 2, "x"),
        ('{"x": "a"}\n{"x": "\\ud800"}\n', 2, "ud800"),
        ('{"x": 1}\n{"x": ' + "9" * 5000 + "}\n", 2, "999"),
        ('{"x": 1}\n{"x": ' + "[" * 100_000 + "]" * 100_000 + "}\n", 2, "[[["),
        ('[{"x": 1},\n{"x": oops}]', 2, "x"),
        ('null\n{"x": {"y": 1}}\n', 1, "null"),
        ('{"x": [{"y": "a"}], "z": 1}\n null\n{"x": null}\n', 2, "null"),
    ],
)
def test_a_broken_line_is_named(write, text, line, excerpt):
    good = write("good.jsonl", '{"x": 0}\n')
    bad = write("bad.jsonl", text)
    with pytest.raises(UsageError, match=f"bad.jsonl, line {line} ") as caught:
        load_rows([good, bad])
    assert excerpt in str(caught.value.have)


def test_a_broken_line_behind_the_first_chunk_is_named(write):
    lines = ['{"x": "' + "a" * 1000 + '"}'] * 12000
    lines[11500] = '{"x": '
    with pytest.raises(UsageError, match="line 11501"):
        load_rows([write("long.jsonl", "\n".join(lines))])


def test_bytes_that_are_not_text_are_named(tmp_path):
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"x": "a"}\n{"x": "\xe9"}\n')
    with pytest.raises(UsageError, match="line 2"):
        load_rows([str(path)])


def test_a_date_that_python_has_not_is_told(tmp_path):
    table = pa.table({"x": [1, 2], "when": pa.array([0, 2**62], pa.timestamp("us"))})
    pq.write_table(table, tmp_path / "far.parquet")
    rows = load_rows([str(tmp_path)])
    with pytest.raises(UsageError, match=r"far\.parquet"):
        rows.span(0, 2)


def test_a_missing_file_names_its_neighbours(write, tmp_path):
    write("train.jsonl", '{"x": 1}\n')
    with pytest.raises(MissingError, match=r"data\.validation") as caught:
        load_rows([str(tmp_path / "trian.jsonl")], "data.validation")
    assert "train.jsonl" in str(caught.value.have)


def test_a_missing_directory_is_named(tmp_path):
    with pytest.raises(MissingError):
        load_rows([str(tmp_path / "nowhere" / "a.jsonl")])


def test_a_directory_without_data_is_refused(write, tmp_path):
    write("d/readme.txt", "x")
    with pytest.raises(MissingError):
        load_rows([str(tmp_path / "d")])


@pytest.mark.parametrize("text", ["", "\n  \n"])
def test_an_empty_file_is_refused(write, text):
    with pytest.raises(UsageError, match=r"data\.train"):
        load_rows([write("empty.jsonl", text)])


def test_an_empty_parquet_file_is_refused(tmp_path):
    path = tmp_path / "empty.parquet"
    pq.write_table(pa.table({"x": pa.array([], pa.int64())}), path)
    with pytest.raises(UsageError):
        load_rows([str(path)])
    full = tmp_path / "full.parquet"
    pq.write_table(pa.table({"x": [1]}), full)
    assert len(load_rows([str(path), str(full)])) == 1


def test_a_broken_parquet_file_is_named(write):
    with pytest.raises(UsageError, match=r"bad\.parquet"):
        load_rows([write("bad.parquet", "PAR1 nonsense")])


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.csv"])
@pytest.mark.parametrize(
    "content",
    [bytes(1 << 20), bytes(600) + b'{"a": 1}', b"PK\5\6" + bytes(18), b"\x1f\x8b\x08" + bytes(30)],
    ids=["zeros", "zeros first", "empty archive", "broken archive"],
)
def test_what_is_no_rows_at_all_is_refused(tmp_path, name, content):
    """Zeros, as a power failure leaves them, look like an archive to `datasets`."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError):
        load_rows([str(tmp_path / name)])


def test_an_empty_file_beside_a_full_one_is_passed_over(write):
    rows = load_rows([write("a.jsonl", ""), write("b.jsonl", '{"x": 1}\n')])
    assert len(rows) == 1


def test_remote_paths_are_refused():
    with pytest.raises(UsageError):
        load_rows(["s3://bucket/a.jsonl"])


def test_an_unknown_kind_is_refused(write):
    with pytest.raises(UsageError):
        load_rows([write("a.txt", "x\n1\n")])


def test_a_value_of_csv_is_the_text_of_the_file(write):
    text = 'prompt,answer\n"What, then?",007\n"two\nlines",NA\n,"say ""so"""\n'
    rows = load_rows([write("a.csv", text), write("b.csv", "\ufeffanswer,level\n1.50,3\n")])
    assert rows.columns == ["prompt", "answer", "level"]
    assert rows.span(0, 4) == [
        {"prompt": "What, then?", "answer": "007", "level": None},
        {"prompt": "two\nlines", "answer": "NA", "level": None},
        {"prompt": "", "answer": 'say "so"', "level": None},
        {"prompt": None, "answer": "1.50", "level": "3"},
    ]


@pytest.mark.parametrize(
    "content",
    [b"x,y\n1,2\n3,4,5\n", b"x,y\n1\n", b"x,x\n1,2\n", b"x\n\xe9\n", b"", b"x\n", b"\0\0\0"],
    ids=["more", "fewer", "twice", "latin", "empty", "no rows", "zeros"],
)
def test_csv_that_is_broken_is_refused(tmp_path, content):
    (tmp_path / "bad.csv").write_bytes(content)
    with pytest.raises(UsageError, match=r"bad\.csv"):
        load_rows([str(tmp_path / "bad.csv")])


def test_mixed_kinds_are_refused(write, tmp_path):
    pq.write_table(pa.table({"x": [1]}), tmp_path / "a.parquet")
    with pytest.raises(UsageError):
        load_rows([write("a.jsonl", '{"x": 1}\n'), str(tmp_path / "a.parquet")])


@pytest.mark.parametrize("others", [{"x": ["7"]}, {"x": [0.5]}, {"x": [1], "y": [1]}])
def test_parquet_files_with_other_columns_or_types_are_refused(tmp_path, others):
    """`datasets` would make 7 of "007"."""
    pq.write_table(pa.table({"x": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table(others), tmp_path / "b.parquet")
    with pytest.raises(UsageError, match=r"b\.parquet"):
        load_rows([str(tmp_path)])


def test_parquet_files_with_other_types_for_the_same_values_are_read(tmp_path):
    words = pa.array(["a", "b"])
    columns = [words, words.dictionary_encode(), words.cast(pa.large_string()), pa.nulls(2)]
    for number, column in enumerate(columns):
        counts = pa.array([1, 2], pa.int64() if number < 2 else pa.int32())
        table = pa.table({"s": pa.array([{"x": 1}] * 2), "x": column, "n": counts})
        pq.write_table(table, tmp_path / f"{number}.parquet")
    rows = load_rows([str(tmp_path)]).span(0, 8)
    assert [row["x"] for row in rows] == ["a", "b"] * 3 + [None] * 2
    assert [row["n"] for row in rows] == [1, 2] * 4


def test_a_cache_that_cannot_be_written_is_named(write, monkeypatch):
    blocked = write("file", "")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", blocked + "/cache")
    with pytest.raises(UsageError, match="HF_DATASETS_CACHE"):
        load_rows([write("a.jsonl", '{"x": 1}\n')])


def test_a_missing_column_names_the_nearest(write):
    rows = load_rows([write("a.jsonl", '{"messages": [], "id": 1}\n')])
    error = rows.missing(["mesages", "zzz"], "data.messages_column")
    assert "messages, id" in str(error.have)
    assert "data.messages_column=messages" in str(error.do)
    assert "=" not in str(rows.missing(["zzz"], "data.text_column").do)
    one_of = rows.missing(["mesages"], "data.messages_column or data.text_column")
    assert "'messages'" in str(one_of.do)
    assert "=" not in str(one_of.do)
