# SPDX-License-Identifier: Apache-2.0
"""The loop: the steps of one mode (train, evaluate, predict) of a model function, and what hooks see of them.

In: a model function, a strategy, and the batches of an input function.
Out: the outputs of each step, the variables in a checkpoint, and summaries; hooks run between the steps.
Always true: every trace of a model function uses the variables of its first trace, found by name; a training step adds 1 to
`global_step`, whatever the number of replicas, unless the model function counts itself; no module here knows `Estimator`.
"""
