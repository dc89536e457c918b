"""What the user sees when the program is killed, whoever kills it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxq.runtime.sessions import open_session

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked")

# An option of the kernel that the model text cannot be checked for: onnxruntime divides by the group.
FATAL = """(float[1,2,4,4] x) => (float[a,b,c,d] y) { y = ConvTranspose<group = 0>(x, w) }"""


def isolated(program: str, patch: str = "") -> list[str]:
    """Return the command of a program, with a patch of what its parent calls."""
    text = f"import os, signal, sys, time\nfrom onnxq.system.isolation import run_isolated\ndef main():\n {program}\n"
    return [sys.executable, "-c", f"{text}{patch}\nrun_isolated(main)\n"]


def outcome(program: str, patch: str = "") -> subprocess.CompletedProcess[str]:
    """Run a program; see `isolated`."""
    return subprocess.run(isolated(program, patch), capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("program", "code"), [("pass", 0), ("sys.exit(3)", 3), ("sys.exit('text')", 1), ("raise ValueError", 1)]
)
def test_the_exit_code_is_that_of_the_program(program: str, code: int) -> None:
    assert outcome(program).returncode == code


def test_what_the_program_prints_is_printed_once() -> None:
    run = outcome("print('out'); sys.stderr.write('err')")
    assert (run.stdout, run.stderr) == ("out\n", "err")


def test_what_is_to_be_done_at_the_end_is_done(tmp_path: Path) -> None:
    program = f"import atexit, tempfile; global held; held = tempfile.TemporaryDirectory(dir={str(tmp_path)!r})"
    run = outcome(f"{program}; atexit.register(print, 'end')")
    assert run.stdout == "end\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("last", "tries"), [("forbid", 1), ("allow", 2)])
def test_a_program_that_forbids_it_ends_with_a_crash(last: str, tries: int) -> None:
    program = (
        "from onnxq.system import isolation; isolation.allow_another_try(); isolation.forbid_another_try()\n"
        " print('try', flush=True)\n"
        f" if not isolation.earlier_crashes(): isolation.{last}_another_try(); os.kill(os.getpid(), signal.SIGABRT)"
    )
    run = outcome(program)
    assert (run.returncode, run.stdout.count("try")) == (2 if tries == 1 else 0, tries)


@pytest.mark.parametrize(
    ("name", "cause"), [("SIGSEGV", "onnxruntime"), ("SIGABRT", "onnxruntime"), ("SIGKILL", "memory")]
)
def test_a_crash_is_a_sentence(name: str, cause: str) -> None:
    run = outcome(f"os.kill(os.getpid(), signal.{name})")
    assert run.returncode == 2
    assert run.stderr.startswith(f"onnxq: the process was ended by {name}, most likely because {cause}")
    assert run.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("crashes", "code", "tries"), [(0, 0, 1), (1, 0, 2), (2, 0, 3), (3, 2, 3)], ids=["none", "one", "two", "three"]
)
def test_a_program_that_allows_it_runs_again_after_a_crash(crashes: int, code: int, tries: int) -> None:
    program = (
        "from onnxq.system.isolation import allow_another_try, earlier_crashes; before = len(earlier_crashes())\n"
        " print('try', flush=True)\n if before < 2: allow_another_try()\n"
        f" if before < {crashes}: os.kill(os.getpid(), signal.SIGABRT)"
    )
    run = outcome(program)
    assert (run.returncode, run.stdout.count("try")) == (code, tries)
    assert run.stderr.count("SIGABRT ended the process") == min(crashes, 2)


def test_a_request_to_stop_reaches_the_program() -> None:
    program = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); os.write(tell, b'.')\n while True: time.sleep(1)"
    # The request comes when the program is ready for it and its parent waits.
    request = "os.read(ready, 1), os.kill(os.getpid(), signal.SIGTERM)"
    waitpid = f"wait = os.waitpid\nos.waitpid = lambda *given: ({request}, wait(*given))[2]"
    run = outcome(program, f"ready, tell = os.pipe()\n{waitpid}")
    assert run.returncode == 7


# A program whose first process crashes, and which may run again.
CRASHES_ONCE = """from onnxq.system.isolation import allow_another_try, earlier_crashes
 print('try', flush=True)
 allow_another_try()
 if not earlier_crashes(): os.kill(os.getpid(), signal.SIGABRT)
"""


@pytest.mark.parametrize(
    ("patch", "code", "tries"),
    [
        (
            "wait = os.waitpid\nos.waitpid = lambda *given: (wait(*given), os.kill(os.getpid(), signal.SIGTERM))[0]",
            2,
            1,
        ),
        # The parent reports the crash between two children.
        ("sys.stderr.write = lambda text: os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, 1),
        ("set = signal.signal\nsignal.signal = lambda *given: (set(*given), None)[1]", 0, 2),
    ],
    ids=["stopped after a crash", "stopped between two tries", "handlers that are not Python's"],
)
def test_a_request_to_stop_starts_no_other_try(patch: str, code: int, tries: int) -> None:
    run = outcome(CRASHES_ONCE, patch)
    assert (run.returncode, run.stdout) == (code, "try\n" * tries)
    assert "Traceback" not in run.stderr


def test_the_program_ends_with_its_parent() -> None:
    with subprocess.Popen(
        isolated("print(os.getpid(), flush=True); time.sleep(600)"), stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
        # The pipe ends when the child does.
        assert parent.stdout.read() == b""
    assert not Path(f"/proc/{child}/exe").exists()


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGKILL", "SIGTERM"])
def test_what_a_killed_program_had_staged_is_removed(name: str, tmp_path: Path) -> None:
    imports = "from pathlib import Path; from onnxq.system.publish import staging"
    stage = f"{imports}; held = staging(Path({str(tmp_path / 'm')!r}))"
    inside = "(held.__enter__() / 'large').write_text('weights')"
    kill = f"{stage}; {inside}; assert list(Path({str(tmp_path)!r}).iterdir()); os.kill(os.getpid(), signal.{name})"
    run = outcome(kill)
    assert run.returncode == (143 if name == "SIGTERM" else 2)
    assert list(tmp_path.iterdir()) == []


def test_a_model_at_which_onnxruntime_crashes_leaves_the_output_alone(build, tmp_path: Path) -> None:
    model = build(FATAL, w=(2, 2, 3, 3))
    onnx.save(model, tmp_path / "fatal.onnx")
    np.save(tmp_path / "x.npy", np.ones((1, 2, 4, 4), np.float32))
    output = tmp_path / "output.onnx"
    output.write_bytes(b"precious")
    command = [sys.executable, "-m", "onnxq", "quantize", tmp_path / "fatal.onnx", "--calib", tmp_path / "x.npy"]
    run = subprocess.run([*command, "-o", output], capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert run.stderr.splitlines()[-1].startswith("onnxq: ")
    assert output.read_bytes() == b"precious"


def test_a_killed_command_leaves_the_old_output_or_the_new_one(
    perceptron: onnx.ModelProto, samples_for, tmp_path: Path
) -> None:
    onnx.save(perceptron, tmp_path / "float.onnx")
    np.savez(tmp_path / "samples.npz", **samples_for(perceptron, 1)[0])
    output, temporary = tmp_path / "out" / "model.onnx", tmp_path / "temporary"
    output.parent.mkdir()
    temporary.mkdir()
    output.write_bytes(b"old")
    command = [sys.executable, "-m", "onnxq", "quantize", tmp_path / "float.onnx", "--calib", tmp_path / "samples.npz"]
    options = {"env": {**os.environ, "TMPDIR": str(temporary)}, "stdout": subprocess.DEVNULL}
    for seconds in np.random.default_rng(0).uniform(0.2, 1.5, 3):
        with subprocess.Popen(
            [*command, "-o", output, "--latency-seconds", "0"],
            **options,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as process:
            time.sleep(seconds)
            os.killpg(process.pid, signal.SIGKILL)
        assert output.read_bytes() == b"old" or open_session(output)
    done = subprocess.run(
        [*command, "-o", output, "--latency-seconds", "0"], **options, check=False, stderr=subprocess.PIPE
    )
    assert done.returncode == 0, done.stderr
    assert open_session(output)
    assert [path.name for path in output.parent.iterdir()] == ["model.onnx"]
