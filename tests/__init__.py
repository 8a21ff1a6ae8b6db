"""A package, so that `from tests import ...` means these and not those that another library installs."""
