"""An evaluation that is killed: run by `test_kill` in a process of its own.

python victim.py OUT LIMIT: prints a line after every batch; kills itself hard after LIMIT of them (0: never).
"""

from __future__ import annotations

import os
import signal
import sys
import threading

import torch
from toys import Linear, labelled, radius_at

from hardsphere.evaluate import Entry, evaluate

SUITE = [
    Entry("noise", "random_noise", {"draws": 3}),
    Entry("weak", "pgd", {"steps": 3}),
    Entry("margin", "pgd", {"steps": 10, "loss": "margin"}),
    Entry("strong", "apgd_targeted", {"steps": 10, "targets": 3}),
]


def run(out: str | None, progress=None):
    torch.set_num_threads(1)
    model = Linear(classes=5)
    x, y = labelled(model, 60, wrong=4)
    balls = [radius_at(model, x[4:], y[4:], part) for part in (0.3, 0.6)]
    return evaluate(model, x, y, balls, suite=SUITE, batch=6, out=out, seed=3, save_images=True, progress=progress)


if __name__ == "__main__":
    limit, delay = int(sys.argv[2]), float(sys.argv[3])
    seen = 0

    def strike() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def watch(step) -> None:
        global seen
        seen += 1
        if seen == limit:
            # From another thread, a little later: in the middle of an attack, of a transaction, of whatever it is at.
            threading.Timer(delay, strike).start()

    run(sys.argv[1], watch)
    print("finished")  # noqa: T201
