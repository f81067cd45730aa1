# SPDX-License-Identifier: Apache-2.0
"""The public names of `tf.estimator`: model functions, ready-made models, hooks, and `train_and_evaluate`."""

from phalanx._src.input.sources.functions import InputContext
from phalanx.errors import NanLossDuringTrainingError  # noqa: F401  (its home is `phalanx.errors`)
from phalanx.errors.names import suggest_names
from phalanx.estimator import experimental, export, inputs, tpu
from phalanx.estimator.config import RunConfig, TaskType
from phalanx.estimator.estimator import Estimator
from phalanx.estimator.exporters import BestExporter, Exporter, FinalExporter, LatestExporter
from phalanx.estimator.exporting.models import export_model
from phalanx.estimator.exporting.saved_model import SavedModel, load_saved_model
from phalanx.estimator.extenders import add_metrics
from phalanx.estimator.heads.base import Head
from phalanx.estimator.heads.classes import BinaryClassHead, MultiClassHead
from phalanx.estimator.heads.regression import RegressionHead
from phalanx.estimator.hooks.basic import LoggingTensorHook, NanTensorHook, StepCounterHook, StopAtStepHook
from phalanx.estimator.hooks.others import FinalOpsHook, GlobalStepWaiterHook, ProfilerHook
from phalanx.estimator.hooks.saving import CheckpointSaverHook, CheckpointSaverListener, SummarySaverHook
from phalanx.estimator.hooks.timer import SecondOrStepTimer
from phalanx.estimator.loop.graph import get_global_step, get_or_create_global_step, identity
from phalanx.estimator.loop.optimizing import minimize
from phalanx.estimator.loop.session import SessionRunArgs, SessionRunContext, SessionRunHook, SessionRunValues
from phalanx.estimator.loop.spec import EstimatorSpec, ModeKeys, Scaffold
from phalanx.estimator.loop.warm_start import WarmStartSettings
from phalanx.estimator.missing import INSTEAD
from phalanx.estimator.models.baselines import BaselineClassifier, BaselineEstimator, BaselineRegressor
from phalanx.estimator.models.deep import DNNClassifier, DNNEstimator, DNNRegressor
from phalanx.estimator.models.keras_model import model_to_estimator
from phalanx.estimator.models.linear import LinearClassifier, LinearEstimator, LinearRegressor
from phalanx.estimator.models.wide_and_deep import (
    DNNLinearCombinedClassifier,
    DNNLinearCombinedEstimator,
    DNNLinearCombinedRegressor,
)
from phalanx.estimator.training import EvalSpec, TrainSpec, train_and_evaluate

__all__ = [
    "BaselineClassifier",
    "BaselineEstimator",
    "BaselineRegressor",
    "BestExporter",
    "BinaryClassHead",
    "CheckpointSaverHook",
    "CheckpointSaverListener",
    "DNNClassifier",
    "DNNEstimator",
    "DNNLinearCombinedClassifier",
    "DNNLinearCombinedEstimator",
    "DNNLinearCombinedRegressor",
    "DNNRegressor",
    "Estimator",
    "EstimatorSpec",
    "EvalSpec",
    "Exporter",
    "FinalExporter",
    "FinalOpsHook",
    "GlobalStepWaiterHook",
    "Head",
    "InputContext",
    "LatestExporter",
    "LinearClassifier",
    "LinearEstimator",
    "LinearRegressor",
    "LoggingTensorHook",
    "ModeKeys",
    "MultiClassHead",
    "NanTensorHook",
    "ProfilerHook",
    "RegressionHead",
    "RunConfig",
    "SavedModel",
    "Scaffold",
    "SecondOrStepTimer",
    "SessionRunArgs",
    "SessionRunContext",
    "SessionRunHook",
    "SessionRunValues",
    "StepCounterHook",
    "StopAtStepHook",
    "SummarySaverHook",
    "TaskType",
    "TrainSpec",
    "WarmStartSettings",
    "add_metrics",
    "experimental",
    "export",
    "export_model",
    "get_global_step",
    "get_or_create_global_step",
    "identity",
    "inputs",
    "load_saved_model",
    "minimize",
    "model_to_estimator",
    "tpu",
    "train_and_evaluate",
]

suggest_names(__name__, INSTEAD)
