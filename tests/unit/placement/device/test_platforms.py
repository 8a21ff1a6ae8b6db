import re
from pathlib import Path

import lockstep
from lockstep.placement.device import Platform, platform_of

PACKAGE = Path(lockstep.__file__).parent

KNOW_THE_NAME = {
    "engine/decoder/build.py",  # options of the TPU's compiler
    "engine/sizing/memory_model.py",  # its temporaries
    "models/attention/training/backend.py",
    "placement/device/chips.py",
    "placement/mesh.py",  # what joins hosts
}


def test_a_platform_that_nobody_has_described_asks_for_nothing():
    assert platform_of("quantum") == platform_of("cpu") == Platform() != platform_of("tpu")


def test_programs_follow_from_what_a_platform_asks_for_not_from_its_name():
    files = {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    assert {name for name, text in files.items() if re.search(r'platform [!=]= "tpu"', text)} == KNOW_THE_NAME
