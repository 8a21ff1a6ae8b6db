"""Tests of repositories, which need git."""

import shutil

import pytest

HAS_GIT = shutil.which("git") is not None
needs_git = pytest.mark.skipif(not HAS_GIT, reason="there is no git here")
