"""A process that interrupts itself while a model of two replicas runs; tests start it with the name of a method."""

import os
import signal
import sys
import threading
import time


def main():
    import phalanx

    phalanx.set_virtual_cpu_devices(2)

    import keras
    import numpy as np
    from twins import X, Y, alone, compiled, replicas, same, state, under

    method = sys.argv[1]
    k = 4 if method == "fit_groups" else 1
    model, count = under(replicas(2), compiled(steps_per_execution=k)), [0]

    class Counting(keras.callbacks.Callback):
        """Counts the finished steps; interrupts the main thread a little later, from another thread."""

        def on_train_batch_end(self, batch, logs=None):
            count[0] += k
            self._interrupt()

        def on_test_batch_end(self, batch, logs=None):
            self._interrupt()

        on_predict_batch_end = on_test_batch_end
        calls = 0

        def _interrupt(self):
            self.calls += 1
            if self.calls == 20:
                threading.Thread(target=self._later, daemon=True).start()

        def _later(self):
            time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGINT)

    x, y = np.tile(X[:16], (100_000, 1)), np.tile(Y[:16], 100_000)
    given = {"batch_size": 16, "verbose": 0, "callbacks": [Counting()]}
    before = state(model)[:4]
    try:
        if method.startswith("fit"):
            model.fit(x, y, shuffle=False, epochs=100, **given)
        elif method == "evaluate":
            model.evaluate(x, y, **given)
        else:
            model.predict(x, **given)
    except KeyboardInterrupt:
        print("interrupted")
    after = model.get_weights()
    if method.startswith("fit"):
        # The interrupted step is done, or not begun; its callback may not have counted it.
        theirs, distances = alone(compiled()), []
        theirs.fit(x[: count[0] * 16], y[: count[0] * 16], shuffle=False, batch_size=16, verbose=0)
        for _ in range(k + 1):
            close = [np.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(after, theirs.get_weights(), strict=True)]
            distances.append(all(close))
            theirs.train_on_batch(x[:16], y[:16])
        print("equal" if distances[0] or distances[k] else "different")
    else:
        same(after, before)
        print("equal")
    model.fit(X, Y, verbose=0)
    assert np.isfinite(model.predict(X, verbose=0)).all()
    print("usable")


if __name__ == "__main__":
    main()
