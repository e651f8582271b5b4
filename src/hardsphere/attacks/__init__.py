"""Attacks, one family per file. Each is a short pure function; see `hardsphere.attacks.base` for what they share."""

from hardsphere.attacks.base import AttackResult as AttackResult
from hardsphere.attacks.base import Stop as Stop
from hardsphere.attacks.pgd import pgd as pgd
