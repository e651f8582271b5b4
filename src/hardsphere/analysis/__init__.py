"""The paper's own analyses: section 3 and its figures, as functions of a model and some labelled images.

Each returns a frozen record with the per-sample numbers, and `to_dict()` sums them up in plain values. They explain
numbers and are no robustness numbers themselves: those come from `hardsphere.evaluate`.
"""

from hardsphere.analysis.angles import FeatureGeometry as FeatureGeometry
from hardsphere.analysis.angles import GradientWeight as GradientWeight
from hardsphere.analysis.angles import feature_geometry as feature_geometry
from hardsphere.analysis.angles import gradient_weight as gradient_weight
from hardsphere.analysis.bias import ClassBias as ClassBias
from hardsphere.analysis.bias import class_bias as class_bias
from hardsphere.analysis.common import adversarial_examples as adversarial_examples
from hardsphere.analysis.direction import StepDirection as StepDirection
from hardsphere.analysis.direction import step_direction as step_direction
from hardsphere.analysis.gradients import GradientRatio as GradientRatio
from hardsphere.analysis.gradients import gradient_ratio as gradient_ratio
from hardsphere.analysis.images import Perturbations as Perturbations
from hardsphere.analysis.images import perturbations as perturbations
from hardsphere.analysis.normalised import NormalisedAttack as NormalisedAttack
from hardsphere.analysis.normalised import normalised_attack as normalised_attack
from hardsphere.analysis.transfer import TransferMatrix as TransferMatrix
from hardsphere.analysis.transfer import transfer_matrix as transfer_matrix
