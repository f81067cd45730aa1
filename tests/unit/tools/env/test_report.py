"""The report for bugs: which variables it shows."""

from phalanx._src.tools.env.report import as_text, variables


def test_secrets_are_hidden():
    """Only values that are known to be harmless are shown; addresses lose login and query; what is no business of ours is left out."""
    told = {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": "gs://me:wo/rd@bucket/x?sig=word",
        "KERAS_API_KEY": "k",
        "RAY_ADDRESS": "ray://me:word@host:1",
        "SLURM_JWT": "j",
        "TF_CONFIG": '{"cluster": {}, "job": {"password": "p"}}',
        "TF_VAR_pat": "v",
        "AWS_SECRET_ACCESS_KEY": "a",
        "HOME": "/home/me",
        "NPROC": "4",
    }
    assert variables(told) == {
        "JAX_COMPILATION_CACHE_DIR": "gs://(hidden)@bucket/x?(hidden)",
        "JAX_PLATFORMS": "cpu",
        "KERAS_API_KEY": "(hidden)",
        "NPROC": "4",
        "RAY_ADDRESS": "ray://(hidden)@host:1",
        "SLURM_JWT": "(hidden)",
        "TF_CONFIG": '{"cluster": {}}',
        "TF_VAR_pat": "(hidden)",
    }


def test_description_that_is_none_is_hidden():
    """It may hold anything, and is shown nowhere."""
    assert variables({"TF_CONFIG": "word"}) == {"TF_CONFIG": "(hidden)"}
    assert variables({"TF_CONFIG": "[1]"}) == {"TF_CONFIG": "{}"}


def test_settings_of_terraform_are_no_settings_of_tensorflow():
    """TF_CLI_... belongs to another program."""
    assert variables({"TF_CLI_CONFIG_FILE": "x", "TF_CONFIG": "{}"}) == {"TF_CONFIG": "{}"}


def test_text_is_aligned():
    """One line per entry, and a word for what is empty."""
    assert as_text({"a": {"x": "1", "long": "2"}, "b": {}}) == "a\n  x     1\n  long  2\nb\n  (none)"
