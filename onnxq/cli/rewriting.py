"""Options of the commands that rewrite float models, as decorators."""

from __future__ import annotations

from onnxq.cli.groups import DATA, FIDELITY, OUTPUT, option
from onnxq.cli.options import FILE, FiniteRange

compared_option = option(
    "--data", group=DATA, type=FILE, help="Samples to compare on, as --calib takes them.  [default: made-up inputs]"
)
tolerance_option = option(
    "--tolerance",
    group=FIDELITY,
    type=FiniteRange(min=0),
    metavar="SHARE",
    default=1e-5,
    show_default=True,
    help="By how much of its largest value an output may differ.",
)
changes_option = option("--report", group=OUTPUT, type=FILE, help="Write what every pass changed and left as JSON.")
