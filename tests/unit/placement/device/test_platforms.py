from lockstep.placement.device import Platform, platform_of
from tests.sources import sources

KNOW_THE_NAME = {
    "engine/decoder/build.py",  # options of the TPU's compiler
    "engine/sizing/memory_model.py",  # its temporaries
}


def test_a_platform_that_nobody_has_described_asks_for_nothing():
    assert platform_of("quantum") == platform_of("cpu") == Platform() != platform_of("tpu")


def test_programs_follow_from_what_a_platform_asks_for_not_from_its_name():
    assert set(sources(r'platform [!=]= "tpu"')) == KNOW_THE_NAME
