"""The report for bugs: which variables it shows."""

from phalanx._src.tools.env import as_text, variables


def test_secrets_are_hidden():
    """Names that look like secrets lose their value, addresses their login; what is no business of ours is left out."""
    told = {
        "JAX_PLATFORMS": "cpu",
        "KERAS_API_KEY": "k",
        "RAY_ADDRESS": "ray://me:word@host:1",
        "TF_CONFIG": '{"cluster": {}}',
        "AWS_SECRET_ACCESS_KEY": "a",
        "HOME": "/home/me",
        "NPROC": "4",
    }
    assert variables(told) == {
        "JAX_PLATFORMS": "cpu",
        "KERAS_API_KEY": "(hidden)",
        "NPROC": "4",
        "RAY_ADDRESS": "ray://(hidden)@host:1",
        "TF_CONFIG": '{"cluster": {}}',
    }


def test_settings_of_terraform_are_no_settings_of_tensorflow():
    """TF_CLI_... belongs to another program."""
    assert variables({"TF_CLI_CONFIG_FILE": "x", "TF_CONFIG": "{}"}) == {"TF_CONFIG": "{}"}


def test_text_is_aligned():
    """One line per entry, and a word for what is empty."""
    assert as_text({"a": {"x": "1", "long": "2"}, "b": {}}) == "a\n  x     1\n  long  2\nb\n  (none)"
