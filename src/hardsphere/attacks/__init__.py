"""Attacks, one family per file. Each is a short pure function; see `hardsphere.attacks.base` for what they share."""

from hardsphere.attacks.apgd import apgd as apgd
from hardsphere.attacks.apgd import apgd_targeted as apgd_targeted
from hardsphere.attacks.base import AttackResult as AttackResult
from hardsphere.attacks.base import Stop as Stop
from hardsphere.attacks.carlini import carlini_l2 as carlini_l2
from hardsphere.attacks.carlini import carlini_linf as carlini_linf
from hardsphere.attacks.carlini import carlini_linf_original as carlini_linf_original
from hardsphere.attacks.deepfool import deepfool as deepfool
from hardsphere.attacks.fab import fab as fab
from hardsphere.attacks.fab import fab_targeted as fab_targeted
from hardsphere.attacks.feature import feature_attack as feature_attack
from hardsphere.attacks.finite_differences import nes as nes
from hardsphere.attacks.finite_differences import spsa as spsa
from hardsphere.attacks.gama import gama as gama
from hardsphere.attacks.losses import dlr_available as dlr_available
from hardsphere.attacks.momentum import mim as mim
from hardsphere.attacks.pgd import bim as bim
from hardsphere.attacks.pgd import fgsm as fgsm
from hardsphere.attacks.pgd import pgd as pgd
from hardsphere.attacks.random import random_noise as random_noise
from hardsphere.attacks.rays import rays as rays
from hardsphere.attacks.square import square as square
from hardsphere.attacks.transfer import transfer as transfer
from hardsphere.attacks.views import expectation as expectation
from hardsphere.attacks.views import feature_normalised as feature_normalised
from hardsphere.attacks.zoo import zoo as zoo
