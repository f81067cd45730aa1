# SPDX-License-Identifier: Apache-2.0
"""What to write instead of a name of tf.estimator that Phalanx does not have."""

_NO_GRAPH = "return arrays from the input_fn; a JAX program has neither placeholders nor sessions"
_MODEL_FN = "a model_fn with Keras layers"
_TREES = "a library of trees; TensorFlow removed these estimators before the rest"
_PROTOS = "build_raw_serving_input_receiver_fn(features); no tf.Example is parsed"

# Names that programs of tf.estimator use, and that cannot or need not exist
# here. An AttributeError alone would not help.
INSTEAD = {
    "BoostedTreesClassifier": _TREES,
    "BoostedTreesEstimator": _TREES,
    "BoostedTreesRegressor": _TREES,
    "ClassificationOutput": "omit export_outputs; an export returns the dict of predictions",
    "FeedFnHook": _NO_GRAPH,
    "InMemoryEvaluatorHook": "estimator.train_and_evaluate",
    "LinearSDCA": "estimator.LinearClassifier, which trains with Ftrl",
    "LogisticRegressionHead": "estimator.RegressionHead(loss_fn=...)",
    "MultiHead": _MODEL_FN,
    "MultiLabelHead": _MODEL_FN,
    "PoissonRegressionHead": "estimator.RegressionHead(loss_fn=...)",
    "PredictOutput": "omit export_outputs; an export returns the dict of predictions",
    "RNNClassifier": "a model_fn with keras.layers.LSTM",
    "RNNEstimator": "a model_fn with keras.layers.LSTM",
    "RegressionOutput": "omit export_outputs; an export returns the dict of predictions",
    "Session": _NO_GRAPH,
    "TensorServingInputReceiver": "estimator.export.ServingInputReceiver",
    "VocabInfo": "assign the rows in the after_create_session of a hook",
    "call_logit_fn": "call the function",
    "classifier_parse_example_spec": _PROTOS,
    "control_dependencies": "omit it; updates happen in the order of the program",
    "get_collection": "omit it; Keras layers update their variables themselves",
    "get_variable": "keras.Variable(value, name=name)",
    "make_parse_example_spec": _PROTOS,
    "make_stop_at_checkpoint_step_hook": "estimator.StopAtStepHook",
    "placeholder": _NO_GRAPH,
    "regressor_parse_example_spec": _PROTOS,
}
