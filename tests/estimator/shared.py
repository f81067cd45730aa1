"""What the recorder, which bases these classes on TensorFlow's, and the tests, which base them on Phalanx's, have in common."""

EVALUATIONS = {
    "with exporters": {},
    "without exporters": {"with_exporters": False},
    "an input of 12 batches": {"batches": 12},
    "an input of 12 batches and no max_steps": {"batches": 12, "max_steps": None},
    "throttle_secs=600": {"throttle_secs": 600},
    "name='x' and steps=1": {"with_exporters": False, "name": "x", "steps": 1},
    "already trained for 20 steps": {"before": 20},
    "already trained for 7 steps": {"before": 7},
    "checkpoints every 6 steps": {"with_exporters": False, "every": 6},
    "start_delay_secs=100": {"with_exporters": False, "start_delay_secs": 100},
}
"""Runs of `train_and_evaluate`, by their names in `recorded.json`."""


class Steps:
    """A hook: notes the number of steps at the begin and at the end. `library` is `tf.compat.v1`."""

    library = None

    def __init__(self, calls, name="", stop_at=None):
        self.calls, self.name, self.stop_at = calls, name, stop_at

    def note(self, method, session):
        step = int(session.run(self.library.train.get_global_step()))
        self.calls.append([f"{self.name}{method}", step])
        return step

    def after_create_session(self, session, coord):
        self.note(" begins", session)

    def end(self, session):
        self.note(" ends", session)


class Calls(Steps):
    """A hook: notes the calls of every method, and stops at a step."""

    def begin(self):
        self.calls.append([f"{self.name}begin"])

    def after_create_session(self, session, coord):
        self.note("after_create_session", session)

    def before_run(self, run_context):
        self.note("before_run", run_context.session)
        return self.library.train.SessionRunArgs(self.library.train.get_global_step())

    def after_run(self, run_context, run_values):
        if self.note("after_run", run_context.session) == self.stop_at:
            run_context.request_stop()

    def end(self, session):
        self.note("end", session)


class Count:
    """A hook: counts steps."""

    steps = 0

    def after_run(self, run_context, run_values):
        self.steps += 1


class Saved:
    """A listener: notes the calls of every method."""

    def __init__(self, calls):
        self.calls = calls

    def begin(self):
        self.calls.append(["begin"])

    def before_save(self, session, global_step_value):
        self.calls.append(["before_save", int(global_step_value)])

    def after_save(self, session, global_step_value):
        self.calls.append(["after_save", int(global_step_value)])

    def end(self, session, global_step_value):
        self.calls.append(["end", int(global_step_value)])


class Exports:
    """An exporter: hands its calls to another one, and notes what that one returned."""

    def __init__(self, calls, exporter):
        self.calls, self.exporter = calls, exporter

    @property
    def name(self):
        return self.exporter.name

    def export(self, estimator, export_path, checkpoint_path, eval_result, is_the_final_export):
        result = self.exporter.export(estimator, export_path, checkpoint_path, eval_result, is_the_final_export)
        step = int(checkpoint_path.rpartition("-")[2])
        self.calls.append([f"export {self.name}", step, bool(is_the_final_export), "a folder" if result else result])
        return result
