"""The table of `make mutants` fits the sources."""

from tests import mutants


def test_each_fault_fits_the_sources():
    """Its text is there once, the result is another program, and its tests exist."""
    misfits = []
    for fault in mutants.FAULTS:
        try:
            mutants.faulty_source(mutants.ROOT / "src", fault)
            mutants.tests_of(fault, mutants.ROOT)
        except mutants.DoesNotFitError as error:
            misfits.append(str(error))
    assert misfits == []


def test_each_fault_has_its_own_name():
    """A fault that survives is known by its name."""
    assert len({fault.name for fault in mutants.FAULTS}) == len(mutants.FAULTS)
