"""Estimators and feature columns with good arguments; bad values replace them one by one."""

import numpy as np
from bad_values import COUNT, EMPTY, INDEX, INTEGER, NONE, TEXTS, Case, named

import phalanx.estimator as estimator
from phalanx import feature_column, train

NAMES = TEXTS - {"no text"}
NOTHING = NONE | EMPTY | {"no text", "0"}
"""What stands for an argument that is left out."""


def of_columns():
    words = feature_column.categorical_column_with_vocabulary_list("word", ["a", "b"])
    age = feature_column.numeric_column("age")
    features = {"age": np.ones((2, 1), "float32")}
    key = {"key": NAMES}
    columns = {"feature_columns": set()}
    table = {"dimension": 4, "combiner": "mean", "initializer": None, "max_norm": None, "trainable": True}
    takes_table = {
        "dimension": COUNT,
        "initializer": NONE,
        "max_norm": NONE | {"1.5", "2**70", "inf", "scalar of NumPy"},
        "trainable": {"True"},
    }
    return named(
        Case(
            feature_column.numeric_column,
            {"key": "x"},
            takes={**key, "shape": COUNT | {"empty tuple", "empty list"}, "dtype": {"class"}},
            functions=("normalizer_fn",),
        ),
        Case(feature_column.bucketized_column, {"source_column": age, "boundaries": [0.0, 1.0]}),
        Case(
            feature_column.categorical_column_with_identity,
            {"key": "x", "num_buckets": 3},
            takes={**key, "num_buckets": COUNT, "default_value": NONE | {"0"}},
        ),
        Case(
            feature_column.categorical_column_with_hash_bucket,
            {"key": "x", "hash_bucket_size": 3},
            takes={**key, "hash_bucket_size": {"integer of NumPy"}, "dtype": {"class", "own class"}},
        ),
        Case(
            feature_column.categorical_column_with_vocabulary_list,
            {"key": "x", "vocabulary_list": ["a"]},
            takes={
                **key,
                "vocabulary_list": {"text array", "list of None"},
                "dtype": NONE | {"own class"},
                "default_value": INTEGER | NONE,
                "num_oov_buckets": INDEX | NONE,
            },
        ),
        Case(
            feature_column.crossed_column,
            {"keys": ["a", "b"], "hash_bucket_size": 10},
            takes={"keys": {"text array"}, "hash_bucket_size": COUNT, "hash_key": NONE | {"0", "integer of NumPy"}},
        ),
        Case(
            feature_column.weighted_categorical_column,
            {"categorical_column": words, "weight_feature_key": "w"},
            takes={"weight_feature_key": NAMES},
        ),
        Case(feature_column.indicator_column, {"categorical_column": words}),
        Case(
            feature_column.embedding_column,
            {"categorical_column": words, **table},
            takes=takes_table,
            functions=("initializer",),
        ),
        Case(
            feature_column.shared_embeddings,
            {"categorical_columns": [words], **table},
            takes={**takes_table, "shared_embedding_collection_name": NONE | NAMES},
            functions=("initializer",),
        ),
        Case(feature_column.prepare, {"features": features, "feature_columns": [age]}, takes=columns),
        Case(feature_column.input_layer, {"features": features, "feature_columns": [age]}, takes={**columns}),
        Case(
            feature_column.linear_model,
            {"features": features, "feature_columns": [age]},
            takes={**columns, "units": {"integer of NumPy"}},
        ),
    )


def of_hooks():
    """Hooks, and what they are made of."""
    every = {"every_n_steps": 3, "every_n_secs": None}
    return named(
        Case(estimator.StopAtStepHook, {"num_steps": 3}, takes={"num_steps": COUNT}),
        Case(estimator.StepCounterHook, {**every}, takes={"every_n_steps": COUNT, "output_dir": NONE | TEXTS}),
        Case(
            estimator.LoggingTensorHook,
            {"tensors": ["loss"], "every_n_iter": 3},
            takes={
                "tensors": {
                    "empty list",
                    "empty dict",
                    "empty tuple",
                    "list of None",
                    "ragged list",
                    "dict of int",
                    "dict of two kinds",
                },
                "every_n_iter": COUNT,
            },
            functions=("formatter",),
        ),
        Case(
            estimator.CheckpointSaverHook,
            {"checkpoint_dir": "x", "save_steps": 3, "checkpoint_basename": "x"},
            takes={
                "checkpoint_dir": TEXTS,
                "save_steps": COUNT,
                "checkpoint_basename": TEXTS,
                "listeners": NONE | EMPTY | {"range", "generator"},
            },
        ),
        Case(
            estimator.SummarySaverHook,
            {"save_steps": 3, "output_dir": "x", "summary_op": {"loss": "loss"}},
            takes={"save_steps": COUNT, "output_dir": TEXTS},
        ),
        Case(
            estimator.ProfilerHook,
            {"save_steps": 3, "output_dir": "x"},
            takes={"save_steps": COUNT, "output_dir": TEXTS},
        ),
        Case(estimator.GlobalStepWaiterHook, {"wait_until_step": 3}, takes={"wait_until_step": INDEX}),
        Case(estimator.SecondOrStepTimer, {"every_steps": 3}, takes={"every_steps": COUNT}),
        Case(estimator.Scaffold, {"saver": train.Checkpoint()}),
    ) | {
        "NanTensorHook": Case(
            lambda fail_on_nan_loss: estimator.NanTensorHook("loss", fail_on_nan_loss),
            {"fail_on_nan_loss": True},
            takes={"fail_on_nan_loss": {"True"}},
        ),
        "FinalOpsHook": Case(
            lambda final_ops_feed_dict: estimator.FinalOpsHook("loss", final_ops_feed_dict),
            {"final_ops_feed_dict": None},
            takes={"final_ops_feed_dict": NONE},
        ),
        "SessionRunArgs": Case(
            lambda feed_dict: estimator.SessionRunArgs("loss", feed_dict),
            {"feed_dict": None},
            takes={"feed_dict": NONE},
        ),
    }


GROUPS = {"columns": of_columns, "estimator_hooks": of_hooks}


REASONS = {
    "users override it, and Phalanx calls it": """
        CheckpointSaverListener.after_save CheckpointSaverListener.before_save CheckpointSaverListener.end
        Exporter.export SessionRunHook.after_create_session SessionRunHook.after_run SessionRunHook.before_run
        SessionRunHook.end""",
    "Keras calls it": """
        DenseFeatures.call LinearFeatures.call _ColumnLayer.__call__ _ColumnLayer.build _ColumnLayer.from_config""",
    "Phalanx calls it, on what it has made itself": """
        Estimator.extended Head.host_labels Head.host_predictions Head.loss Head.predictions
        SecondOrStepTimer.should_trigger_for_step SecondOrStepTimer.update_last_triggered_step SessionRunContext
        SessionRunValues WarmStartSettings.warm_start""",
    "it needs a model function or a training: tests/unit/estimator and tests/unit/feature_column have its messages": """
        BaselineClassifier BaselineEstimator BaselineRegressor BestExporter BinaryClassHead DNNClassifier
        DNNEstimator DNNLinearCombinedClassifier DNNLinearCombinedEstimator DNNLinearCombinedRegressor
        DNNRegressor DenseFeatures Estimator Estimator.eval_dir Estimator.evaluate Estimator.export_saved_model
        Estimator.get_variable_value Estimator.predict Estimator.train EstimatorSpec EvalSpec FinalExporter
        Function.prepare Head.create_estimator_spec LatestExporter LinearClassifier LinearEstimator
        LinearFeatures LinearRegressor MultiClassHead RegressionHead RunConfig RunConfig.replace SavedModel
        SavedModel.predict ServingInputReceiver TrainSpec WarmStartSettings add_metrics
        build_parsing_serving_input_receiver_fn build_raw_serving_input_receiver_fn
        categorical_column_with_vocabulary_file export_model get_global_step get_or_create_global_step identity
        load_saved_model make_early_stopping_hook minimize model_to_estimator read_eval_metrics
        stop_if_higher_hook stop_if_lower_hook stop_if_no_decrease_hook stop_if_no_increase_hook
        train_and_evaluate""",
}
"""Callables without a case, each with the reason."""
