"""Evaluation: samples go through a suite of attacks, the runner writes a ledger, and every number is a query on it.

`hardsphere.evaluate` is both this package and, because that is what people want of it, the function `evaluate`.
"""

from __future__ import annotations

from hardsphere.callable import make_callable
from hardsphere.evaluate.clock import Progress as Progress
from hardsphere.evaluate.images import PngCheck as PngCheck
from hardsphere.evaluate.images import save_images as save_images
from hardsphere.evaluate.images import verify_png as verify_png
from hardsphere.evaluate.ledger import Ledger as Ledger
from hardsphere.evaluate.ledger import Outcome as Outcome
from hardsphere.evaluate.ledger import merge as merge
from hardsphere.evaluate.ledger import open_ledger as open_ledger
from hardsphere.evaluate.runner import Evaluation as Evaluation
from hardsphere.evaluate.runner import evaluate as evaluate
from hardsphere.evaluate.suites import SUITES as SUITES
from hardsphere.evaluate.suites import Entry as Entry
from hardsphere.evaluate.suites import OfEps as OfEps
from hardsphere.evaluate.suites import Suite as Suite
from hardsphere.evaluate.suites import suite_named as suite_named

make_callable(__name__)  # `hardsphere.evaluate(...)`
