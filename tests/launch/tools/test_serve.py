"""`rlsys serve`: what is said before an engine starts. What it serves is tested in tests/workers/serve."""

import socket

from command_line import problems


def test_serve_names_the_checkpoints_of_a_run(rlsys, finished):
    done = rlsys("serve", finished, "--step", "3")
    assert done.returncode == 2
    assert problems(done) == [f"--step: {finished} has no checkpoint of step 3. It has 2, 4."]


def test_serve_wants_a_run(rlsys, tmp_path):
    done = rlsys("serve", tmp_path)
    assert done.returncode == 2
    assert "is no run, and belongs to none" in problems(done)[0]


def test_serve_wants_a_port_that_is_free(rlsys, finished):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = rlsys("serve", finished, "--port", str(port))
    assert done.returncode == 2
    assert problems(done)[0].startswith(f"--port: {port} on 127.0.0.1 cannot be used")


def test_serve_refuses_a_damaged_checkpoint(rlsys, finished):
    (finished / "checkpoints" / "step-000002" / "model" / "model.safetensors").write_text("other weights")
    done = rlsys("serve", finished, "--step", "2", "--port", "0")
    assert done.returncode == 2
    assert "step-000002 is damaged" in problems(done)[0]
