"""Datasets in several processes: every row exactly once, the same number of steps, and positions that move."""

import evaluation
import hypothesis
import pytest
import tasks
from evaluation import ROWS
from handed_over import cases
from hypothesis import strategies as st
from tasks import BATCH
from tests.draws import draws

import phalanx

UNEVEN = [175, 5, 50, 20]
"""With two workers, the second has a ninth of the rows of the first."""

SOURCES = ["arrays", "generator", "rows", "files", "function"]


@pytest.fixture
def two(cluster_of):
    """Two workers with one device each."""
    return cluster_of(2, 1)


@pytest.fixture
def two_by_two(cluster_of):
    """Two workers with two devices each."""
    return cluster_of(2, 2)


@pytest.fixture
def files(tmp_path):
    """Returns a function that writes files of so many rows each, and returns their folder."""

    def write(lengths):
        tasks.write_files(tmp_path, lengths)
        return str(tmp_path)

    return write


def flat(nest):
    """The row numbers in it, sorted."""
    return sorted(flat_in_order(nest))


def flat_in_order(nest):
    """The row numbers in it."""
    return [i for x in nest for i in flat_in_order(x)] if isinstance(nest, list) else [nest]


# Two workers with a device each read files in the next test.
@pytest.mark.cover(
    ["size", "source"], {((2, 1), source) for source in SOURCES if source != "files"} | {((2, 2), "files")}
)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("size", [(2, 1), (2, 2)], ids=["2x1", "2x2"])
def test_evaluation_is_exact(cluster_of, files, size, source):
    """Loss and accuracy are those of NumPy; every row once; all workers take the same steps with even shares."""
    replies = cluster_of(*size).call("evaluate", source=source, folder=files(UNEVEN))
    assert [r["result"] for r in replies] == [pytest.approx(evaluation.expected(), rel=0, abs=1e-6)] * 2
    assert flat([r["steps"] for r in replies]) == list(range(ROWS))
    assert len({len(r["steps"]) for r in replies}) == 1
    for step in zip(*(r["steps"] for r in replies), strict=True):
        shares = [len(rows) for worker in step for rows in worker]
        if source not in ("files", "function"):
            assert max(shares) - min(shares) <= 1
            assert sum(shares) in (BATCH, ROWS % BATCH)


def test_files_are_read_by_one_worker_each(two, files):
    """The second worker opens its own files only, and goes on with batches without rows when they have ended."""
    first, second = two.call("evaluate", source="files", folder=files(UNEVEN))
    assert [first["opened"], second["opened"]] == [["0.npz", "2.npz"], ["1.npz", "3.npz"]]
    assert flat(second["steps"]) == [*range(175, 180), *range(230, 250)]
    assert [len(step[0]) for step in second["steps"]] == [24, 1] + [0] * 8


def test_functions_of_different_lengths(two):
    """Nothing is divided, and the worker with fewer batches waits for no one."""
    first, second = two.call("evaluate", source="function")
    assert flat_in_order(first["steps"]) == list(range(180))
    assert flat_in_order(second["steps"]) == list(range(180, 250))
    assert [step for step in second["steps"] if step != [[]]][-1] == [list(range(228, 250))]


def test_policy_off_reads_everything_on_each_worker(two):
    """Each worker reads everything, and the sums count each row twice."""
    first, second = two.call("evaluate", source="arrays", policy="OFF")
    assert flat(first["steps"]) == flat(second["steps"]) == list(range(ROWS))
    assert first["result"].rows == 2 * ROWS


def test_fewer_files_than_workers_under_auto(two, files):
    """The rows are divided instead; the chief says so in one line, the other says nothing."""
    chief, other = two.call("evaluate", source="files", folder=files([ROWS]))
    assert [m for m in chief["messages"] if "too few" in m] == [
        "1 files are too few for 2 workers, so each reads its rows of every batch"
    ]
    assert other["messages"] == []
    assert flat([chief["steps"], other["steps"]]) == list(range(ROWS))
    assert {name for name, *_ in chief["shards"]} == {"DATA"}


def test_fewer_files_than_workers_under_file(two, files):
    """One error in every worker, before the first step."""
    replies = two.call("evaluate", source="files", policy="FILE", folder=files([ROWS]))
    assert len(replies) == 2
    for reply in replies:
        assert reply.startswith("InputError: AutoShardPolicy.FILE for 1 files: the dataset has 1 files for 2 workers.")
        assert "\nHINT: " in reply


def test_a_worker_whose_files_are_empty(two, files):
    """It has no row to show what a batch looks like, and still takes all steps."""
    replies = two.call("evaluate", source="files", folder=files([50, 0]))
    assert flat([r["steps"] for r in replies]) == list(range(50))
    assert [r["result"].rows for r in replies] == [50, 50]


@pytest.mark.parametrize("source", ["failing function", "failing files"])
def test_failure_reaches_both(two, files, source):
    """The worker whose data fails raises what its data raised, the other an error that names it."""
    first, second = two.call("evaluate", source=source, folder=files([100, 100]))
    assert first.startswith("InputError: the next batch of worker 0: the data of worker 1 failed")
    assert second.startswith("OSError: ")
    assert two.call("evaluate", source="arrays")[0]["result"].rows == ROWS


@pytest.mark.parametrize("source", ["arrays", "generator", "files"])
def test_several_steps_in_one_program(two, files, source):
    """`run_steps` sees each row once too."""
    sums, same = two.call("several_steps", source=source, folder=files(UNEVEN))
    assert sums == same
    assert sum(sums) == sum(range(ROWS))


@pytest.mark.parametrize("source", ["generator", "function"])
def test_next_in_a_function(two, source):
    """Workers agree on a batch while `phalanx.function` is traced, as TensorFlow's tutorial of a custom loop on two workers has it."""
    sums, same = two.call("steps_that_draw", source=source)
    assert sums == same
    assert sum(sums) == sum(range(ROWS))


def test_batches_that_grow(two_by_two):
    """All workers make room for them at the same step, so that they run the same program."""
    first, second = two_by_two.call("growing_batches")
    assert [total for total, _ in first] == [4, 5, 9, 6, 17]
    assert first == second


def test_explain_sharding_agrees_in_all_workers(two, files):
    """The same in all workers."""
    folder = files(UNEVEN)
    for source, policy, first, second in [
        (
            "arrays",
            "AUTO",
            "reads records 0..23 of every 48, of 250 in all (DATA)",
            "reads records 24..47 of every 48",
        ),
        (
            "rows",
            "AUTO",
            "reads records 0..23 of every 48 (DATA; each worker reads everything and keeps its own records)",
            "24..47",
        ),
        (
            "generator",
            "AUTO",
            "reads its part of every batch (DATA; each worker reads everything and keeps its own rows)",
            "its part",
        ),
        ("files", "AUTO", "reads 2 of 4 files (FILE)", "reads 2 of 4 files (FILE)"),
        ("files", "DATA", "reads records 0..23 of every 48", "reads records 24..47"),
        ("arrays", "OFF", "reads all records of 250 (OFF)", "reads all records of 250 (OFF)"),
    ]:
        shards, same = two.call("explain", source=source, policy=policy, folder=folder)
        assert shards == same
        assert f"worker 0 of 2 {first}" in shards[0][1]
        assert second in shards[1][1]


@pytest.mark.parametrize("source", ["arrays", "generator", "files"])
@pytest.mark.parametrize("steps", [2, 4])
def test_position_moves_to_other_workers(cluster_of, two_by_two, files, tmp_path, source, steps):
    """Saved on 2 workers x 2 replicas, it goes on on 1 x 4 and on 4 x 1: each remaining row once."""
    folder, path = files(UNEVEN), str(tmp_path / "position")
    before = flat(two_by_two.call("read", source=source, folder=folder, steps=steps, save=path))
    expected = sorted(set(range(ROWS)) - set(before))
    assert len(set(before)) == len(before) > 0
    one = phalanx.MirroredStrategy([f"cpu:{i}" for i in range(4)])
    assert flat(tasks.read(one, source=source, folder=folder, load=path)) == expected
    assert flat(cluster_of(4, 1).call("read", source=source, folder=folder, load=path)) == expected
    assert flat(two_by_two.call("read", source=source, folder=folder, load=path)) == expected


def test_position_comes_from_one_worker(cluster_of, files, tmp_path):
    """Saved on 1 x 4, it goes on on 2 x 2, where each worker finds its own files half read."""
    folder, path = files(UNEVEN), str(tmp_path / "position")
    one = phalanx.MirroredStrategy([f"cpu:{i}" for i in range(4)])
    before = tasks.read(one, source="files", folder=folder, steps=4, save=path)
    after = cluster_of(2, 2).call("read", source="files", folder=folder, load=path)
    assert flat([before, *after]) == list(range(ROWS))


def test_position_of_functions_stays_with_the_workers(cluster_of, two, tmp_path):
    """Their datasets are the workers' own: the same number goes on, another number is an error."""
    path = str(tmp_path / "position")
    before = two.call("read", source="function", steps=3, save=path)
    after = two.call("read", source="function", load=path)
    assert flat([before, after]) == list(range(ROWS))
    for reply in cluster_of(4, 1).call("read", source="function", load=path):
        assert "iterator does not fit this program: the number of workers is now 4" in reply


@pytest.mark.parametrize(("source", "batches"), [("arrays", 6), ("generator", 6), ("files", 6), ("function", 4)])
def test_iterator_restores_from_every_position(two, files, source, batches):
    """The law of all iterators, in two processes at once."""
    assert two.call("states_everywhere", source=source, folder=files([130, 20])) == [batches, batches]


def test_one_thread_for_one_device(two):
    """A process of one device needs no second thread: NPROC is cores / processes, which may be 1."""
    assert two.call("one_thread_for_one_device") == [2, 2]


def test_local_results_are_real_rows_of_own_replicas(two):
    """Each worker gets the real rows of its own replicas, of short batches too."""
    assert two.call("local_results") == [[[[0, 1, 2, 3]], [[7, 8]]], [[[4, 5, 6]], [[9]]]]


def test_local_results_of_a_nest(two_by_two):
    """What is not distributed is there once for each local replica."""
    first, second = two_by_two.call("local_results_of_nest")
    assert first == [([0, 1], 3.0), ([2, 3], 3.0)]
    assert second == [([4, 5], 3.0), ([6, 7], 3.0)]


def test_gather_returns_real_rows_of_all_workers(two):
    """Every worker gets the real rows of all."""
    assert two.call("gathered") == [[[0, 1, 2, 3, 4, 5, 6], [7, 8, 9]]] * 2


def test_values_from_function(two_by_two):
    """Components with 1, 2, 3 and 4 rows of ones: their sum is 10, their mean 1."""
    assert two_by_two.call("values_from_function") == [[10, 1]] * 2


def test_failure_under_data_reaches_both(two):
    """Where the workers divide every batch and the generator of one fails, the other does not wait for it for ever."""
    first, second = two.call("evaluate", source="failing generator")
    assert first.startswith("InputError: the next batch of worker 0: the data of worker 1 failed")
    assert second.startswith("OSError: the disk of worker 1 is gone")


@pytest.mark.parametrize("kind", ["arrays", "function", "batches"])
def test_workers_with_other_rows_are_named(two, kind):
    """In an error of all workers, before a step has mixed the rows of different batches."""
    for text in two.call("fit_other_rows", kind=kind):
        assert isinstance(text, str), text
        assert text.startswith(
            "InputError: fit, evaluate or predict on 2 workers: the first batch of rank 1 is not that of rank 0, so"
        )
        hint = "\nHINT: the same data, in the same order, on all workers; keras.utils.set_random_seed(1) with the same number on all, "
        assert hint in text
        assert "; get_state() and set_state(state)" in text


@draws(5, 300)
@hypothesis.given(cases(), st.integers(1, 2))
def test_rows_are_those_that_were_handed_over(cluster_of, case, devices):
    """The law of tests/contract, in two processes: what both see of a step are the rows of that step."""
    if case["kind"] == "function":
        case["sizes"] = case["sizes"][:1] * (len(case["sizes"]) * devices)
    replies = cluster_of(2, devices).call("rows_handed_over", case=case)
    assert all(isinstance(reply, list) for reply in replies), replies
    rows = list(range(sum(case["sizes"])))
    if case["kind"] == "function":  # Each worker has the data of its own function.
        assert [flat_in_order(reply) for reply in replies] == [rows, rows]
    elif "shuffled" in case["kind"]:
        assert flat(replies) == rows
    else:
        assert flat_in_order([list(step) for step in zip(*replies, strict=True)]) == rows
