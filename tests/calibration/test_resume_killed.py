"""A run that is killed at random moments ends as if it was not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from calibration.resumed_samples import whole
from onnxq.calibration.statistics import save_statistics

PROGRAM = """
import os, random, signal, sys, time
from pathlib import Path
import onnxruntime
from observations import wanted
from test_resume import MODEL, SAMPLES, TAPS
from onnxq.calibration.calibrate import Collection, calibrate_tensors, discard_checkpoints
from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.calibration.provenance import sample_digest
from onnxq.calibration.accumulators import SampleExtremes
from onnxq.calibration.statistics import save_statistics

whole, output = map(Path, sys.argv[1:])
moments, kills, finished, kept = random.Random(0), 0, 0, 0
how = Collection(checkpoint=output, seconds=0)
while kills < 20 or not finished:
    kept += any(output.parent.iterdir())
    child = os.fork()
    if not child:
        save_statistics(calibrate_tensors(MODEL, SAMPLES, wanted(TAPS), how), output)
        discard_checkpoints(output)
        os._exit(0)
    time.sleep(moments.uniform(0, 0.3))
    os.kill(child, signal.SIGKILL)
    kills += os.waitpid(child, 0)[1] == signal.SIGKILL
    if output.exists():
        finished += 1
        assert output.read_bytes() == whole.read_bytes()
        for path in output.parent.iterdir():
            path.unlink()
print(kills, finished, kept)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills processes that it forks")
def test_a_run_that_is_killed_at_random_moments_ends_with_the_same_bits(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "output").mkdir()
    save_statistics(whole(), tmp_path / "whole.npz")
    arguments = [tmp_path / "program.py", tmp_path / "whole.npz", tmp_path / "output" / "s.npz"]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), str(Path(__file__).parent), *sys.path])
    }
    run = subprocess.run(
        [sys.executable, *map(str, arguments)], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    kills, finished, kept = map(int, run.stdout.split())
    assert kills >= 20
    assert finished >= 1
    assert kept >= 1
