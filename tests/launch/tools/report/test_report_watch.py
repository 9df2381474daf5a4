"""The server of a report that grows with its run."""

import gzip
import json
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request

import pytest
from made_run import EOS, damage, make_batch, make_run

from launch.tools.report.sample_pieces import (
    sample_files,
    sample_numbers,
)
from launch.tools.report.watch import create_server
from rlsys.errors import ConfigError
from rlsys.runs.samples import write_samples


@pytest.fixture
def watched(tmp_path):
    """A run of four steps, `get(path, tag)` for status, body and tag, and the server that watches it."""
    run = make_run(tmp_path / "demo", 4)
    server = create_server(run, 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()

    def get(path: str, tag: str = "", address: str = "") -> tuple[int, bytes, str]:
        request = urllib.request.Request((address or server.address) + path, headers={"If-None-Match": tag})
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                body = answer.read()
                return (
                    answer.status,
                    gzip.decompress(body) if answer.headers["Content-Encoding"] else body,
                    answer.headers["ETag"] or "",
                )
        except urllib.error.HTTPError as error:
            return error.code, error.read(), ""

    yield run, get, server
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_served_page_has_no_data_and_may_only_ask_its_server(watched):
    _, get, server = watched
    status, body, _ = get("")
    text = body.decode()
    assert status == 200
    assert "connect-src 'self'" in text
    assert 'id="piece-' not in text
    assert server.server_address[0] == "127.0.0.1"


def test_nothing_is_served_without_the_key(watched):
    _, get, server = watched
    root = f"http://127.0.0.1:{server.port}/"
    for path in ("", "main", "wrong/main", f"{server.key}x/main"):
        status, body, _ = get(path, address=root)
        assert (status, b"whole line" in body) == (404, True)
    for path in ("texts-../config.yaml", "texts-step-9", "../main", "tokens-step-000099", "config.yaml"):
        assert get(path)[0] in (404, 400)


def test_unchanged_data_is_not_sent_again(watched):
    run, get, _ = watched
    status, body, tag = get("main")
    assert (status, json.loads(body)["runs"][0]["done"]) == (200, 4)
    assert get("main", tag)[:2] == (304, b"")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "reward/mean": 0.5}\n')
    status, body, _ = get("main", tag)
    assert (status, json.loads(body)["runs"][0]["done"]) == (200, 5)


def test_new_and_rewritten_samples_are_sent(watched):
    run, get, _ = watched
    first = json.loads(get("numbers?after=0")[1])
    assert {f["name"] for f in first["files"]} == {
        "eval-000000",
        "eval-000004",
        *(f"step-00000{n}" for n in range(1, 5)),
    }
    assert json.loads(get(f"numbers?after={first['serial']}")[1])["files"] == []
    write_samples(run / "samples" / "step-000005.parquet", make_batch(5, 1, 2, None))
    write_samples(run / "samples" / "step-000004.parquet", make_batch(4, 1, 3, None))
    again = json.loads(get(f"numbers?after={first['serial']}")[1])["files"]
    assert sorted((f["name"], f["count"]) for f in again) == [("step-000004", 3), ("step-000005", 2)]


def test_a_damaged_file_is_reported_until_it_is_complete(watched):
    run, get, _ = watched
    file = run / "samples" / "step-000002.parquet"
    whole = file.read_bytes()
    file.write_bytes(whole[:100])
    status, body, _ = get("numbers?after=0")
    first = json.loads(body)
    assert (status, len(first["files"])) == (200, 5)
    [named] = first["unread"]
    assert named.startswith("samples/step-000002.parquet cannot be read")
    file.write_bytes(whole)
    again = json.loads(get(f"numbers?after={first['serial']}")[1])
    assert [one["name"] for one in again["files"]] == ["step-000002"]
    assert again["unread"] == []


def test_files_of_samples_are_read_again_only_after_a_change(watched, monkeypatch):
    run, get, _ = watched
    read = []
    monkeypatch.setattr(
        "launch.tools.report.watch.sample_numbers", lambda file: read.append(file.stem) or sample_numbers(file)
    )
    damage(run / "samples" / "step-000002.parquet", "cut")
    for _ in range(3):
        get("numbers?after=0")
    assert sorted(read) == sorted(file.stem for file in sample_files(run))


def test_texts_and_tokens_are_sent_on_request(watched):
    _, get, _ = watched
    assert len(json.loads(get("texts-step-000001")[1])["text"]) == 16
    assert EOS in json.loads(get("tokens-eval-000004")[1])["known"]


def test_a_removed_run_is_reported(watched):
    run, get, _ = watched
    run.rename(run.with_name("elsewhere"))
    status, body, _ = get("main", "old")
    assert (status, b"does not exist" in body) == (503, True)


def test_watch_refuses_a_path_to_something_else(tmp_path):
    (tmp_path / "notes.txt").write_text("about something else")
    for no_run in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(ConfigError, match=r"is no run: it has no config.yaml"):
            create_server(no_run, 0)
    with pytest.raises(ConfigError, match=r"notes.txt is a file: no run can be in it"):
        create_server(tmp_path / "notes.txt" / "run", 0)


def test_a_port_that_is_taken_is_refused_with_a_way_out(watched):
    run, _, server = watched
    with pytest.raises(ConfigError, match=r"--port: \d+ on 127.0.0.1 cannot be used.*0 for any free one"):
        create_server(run, server.port)


@pytest.mark.parametrize("left", [None, (), (".lock", ".config.yaml.tmp")])
def test_watch_may_be_started_before_the_run(tmp_path, left):
    if left is not None:
        (tmp_path / "demo").mkdir()
        for name in left:
            (tmp_path / "demo" / name).touch()
    command = [sys.executable, "-m", "launch", "watch", "demo", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        address = process.stdout.readline().removeprefix("demo: ").strip()
        process.stdout.readline()
        waits = process.stdout.readline().strip()
        assert waits == f"There is no run in {tmp_path}/demo yet; the page waits for it to begin."
        with urllib.request.urlopen(f"{address}main", timeout=20) as answer:
            assert (answer.status, answer.read().decode()) == (202, waits)
        make_run(tmp_path / "demo", 2)
        with urllib.request.urlopen(f"{address}main", timeout=20) as answer:
            assert json.loads(gzip.decompress(answer.read()))["runs"][0]["done"] == 2
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


def test_watch_prints_its_address_and_a_tunnel_and_ends_with_ctrl_c(tmp_path):
    run = make_run(tmp_path / "demo", 1)
    command = [sys.executable, "-m", "launch", "watch", str(run), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        first, way = process.stdout.readline(), process.stdout.readline()
        address = re.fullmatch(r"demo: (http://127\.0\.0\.1:(\d+)/[\w-]{16}/)\n", first)
        assert f"ssh -N -L {address[2]}:127.0.0.1:{address[2]} " in way
        with urllib.request.urlopen(address[1], timeout=20) as answer:
            assert b"<title>demo</title>" in answer.read()
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        assert "The run is not affected." in process.stdout.read()
