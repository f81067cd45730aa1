# SPDX-License-Identifier: Apache-2.0
"""Ready-made hooks: code that runs between the steps of a training run, with the names of `tf.estimator`.

In: the session of the loop, after every step.
Out: checkpoints, summaries, log lines and profiles, and requests to stop.
Always true: a hook acts on the same steps in all processes, because the clock of the chief decides; a hook that reads values
stalls the devices only on steps where it is due; no module here knows `Estimator`. `early_stopping` does, and stands above.
"""
