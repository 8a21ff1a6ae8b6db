import random

import pytest

from lockstep.check.align import Gap, gaps


def stretches(left, right):
    return [(left[slice(*gap.left)], right[slice(*gap.right)]) for gap in gaps(left, right)]


def test_equal_sequences_have_no_gap():
    assert stretches("abcabc", "abcabc") == []


def test_one_that_is_missing_is_the_only_gap():
    assert stretches("abxcabc", "abcabc") == [("x", "")]
    assert stretches("abcabc", "abcabcy") == [("", "y")]


def test_a_loop_with_one_extra_launch_in_each_step():
    assert stretches("stepLstepLstepL", "stepstepstep") == [("L", "")] * 3


def test_two_that_are_exchanged_leave_one_out_on_each_side():
    assert stretches("abxycdef", "abyxcdef") == [("x", ""), ("", "x")]


def test_what_is_left_of_the_longer_one():
    (gap,) = gaps("ab" + "z" * 300, "ab")
    assert gap.left == (2, 302) and gap.right == (2, 2)


def test_nothing_in_common():
    assert stretches("aaa", "bbbb") == [("aaa", "bbbb")]


def longest_common(left, right):
    """The length of a longest common subsequence, by the table of all prefixes."""
    table = [[0] * (len(right) + 1) for _ in range(len(left) + 1)]
    for i, x in enumerate(left):
        for j, y in enumerate(right):
            table[i + 1][j + 1] = table[i][j] + 1 if x == y else max(table[i][j + 1], table[i + 1][j])
    return table[-1][-1]


@pytest.mark.parametrize("most", [0, 1, 3, 1000])
def test_what_is_between_gaps_is_equal_and_as_much_as_can_be(most):
    draw = random.Random(most)
    for _ in range(200):
        left, right = ("".join(draw.choices("abc", k=draw.randrange(12))) for _ in range(2))
        same = i = j = 0
        for gap in [*gaps(left, right, most), Gap(left=(len(left), 0), right=(len(right), 0))]:
            assert left[i : gap.left[0]] == right[j : gap.right[0]]
            same += gap.left[0] - i
            i, j = gap.left[1], gap.right[1]
        assert most < 1000 or same == longest_common(left, right)


def test_where_more_may_follow_what_one_has_left_is_the_last_gap():
    found = gaps("slslslsl", "ssssssss", open_end=True)
    assert [(gap.left, gap.right) for gap in found] == [
        ((1, 2), (1, 1)),
        ((3, 4), (2, 2)),
        ((5, 6), (3, 3)),
        ((7, 8), (4, 8)),
    ]
