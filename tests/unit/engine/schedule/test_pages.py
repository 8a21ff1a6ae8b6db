from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.engine.schedule import NULL_PAGE, PageAllocator
from lockstep.engine.schedule.pages import PrefixTable, page_keys


@settings(max_examples=200)
@given(st.integers(2, 12), st.data())
def test_no_overlap_no_leak_and_lowest_first(num_pages: int, data: st.DataObject) -> None:
    allocator = PageAllocator(num_pages)
    holders: list[list[int]] = []  # each page is listed once per reader
    for _ in range(data.draw(st.integers(0, 20))):
        held = {page for pages in holders for page in pages}
        free = sorted(set(range(1, num_pages)) - held)
        assert allocator.num_free == len(free)
        action = data.draw(st.sampled_from(["allocate", "share", "release"]))
        if action == "allocate":
            count = data.draw(st.integers(0, len(free)))
            pages = allocator.allocate(count)
            assert pages == free[:count], "not the lowest free pages"
            holders.append(pages)
        elif action == "share" and held:
            pages = data.draw(st.lists(st.sampled_from(sorted(held)), unique=True))
            for page in pages:
                allocator.share(page)
            holders.append(pages)
        elif action == "release" and holders:
            pages = holders.pop(data.draw(st.integers(0, len(holders) - 1)))
            still_held = {page for others in holders for page in others}
            assert allocator.release(pages) == [page for page in pages if page not in still_held]
    for pages in holders:
        allocator.release(pages)
    assert allocator.num_free == num_pages - 1
    everything = allocator.allocate(num_pages - 1)
    assert everything == list(range(1, num_pages)) and NULL_PAGE not in everything


def test_kept_pages_are_free_and_those_released_longest_ago_go_first() -> None:
    allocator = PageAllocator(8)
    first, second = allocator.allocate(3), allocator.allocate(2)
    allocator.keep(first, 7)
    allocator.keep([first[0], *second], 8)
    assert allocator.release(first) == allocator.release(second) == [] and (allocator.num_free, allocator.num_idle) == (
        7,
        5,
    )
    allocator.share(first[0])
    assert allocator.num_free == 6 and allocator.make_room(2) == [] and allocator.make_room(4) == [3, 2]
    assert allocator.allocate(4) == [2, 3, 6, 7] and allocator.num_free == 2
    allocator.release([first[0]])
    assert allocator.forget(7) == [] and allocator.num_idle == 3, "the first page is still kept by the other"
    assert allocator.forget(8) == [1, 4, 5] and (allocator.num_free, allocator.num_idle) == (3, 0)
    assert not (allocator._keepers or allocator._kept) and allocator.forget(9) == []


def test_taking_too_many_takes_none() -> None:
    allocator = PageAllocator(4)
    try:
        allocator.allocate(4)
    except AssertionError:
        pass
    else:
        raise AssertionError("4 pages of 3 were handed out")
    assert allocator.allocate(3) == [1, 2, 3]


tokens = st.lists(st.integers(0, 2), max_size=12)


@settings(max_examples=300)
@given(tokens, tokens, st.integers(1, 4))
def test_keys_are_equal_exactly_where_everything_before_is(a: list[int], b: list[int], size: int) -> None:
    first, second = page_keys(a, size), page_keys(b, size)
    assert (len(first), len(second)) == (len(a) // size, len(b) // size), "only full pages have keys"
    for i, (left, right) in enumerate(zip(first, second, strict=False)):
        assert (left == right) == (a[: (i + 1) * size] == b[: (i + 1) * size])


def test_the_same_page_after_another_beginning_has_another_key() -> None:
    assert page_keys([1, 2, 7, 7], 2)[1] != page_keys([1, 3, 7, 7], 2)[1]
    assert page_keys([7, 7, 7, 7], 2)[0] != page_keys([7, 7, 7, 7], 2)[1]


def test_keys_are_the_same_in_every_process() -> None:
    (key,) = page_keys([1, 2, 3], 3)
    assert key.hex() == "4636993d3e1da4e9d6b8f87b79e8f7c6d018580d52661950eabc3845c5897a4d"


def test_match_finds_the_longest_run_from_the_start() -> None:
    table, keys = PrefixTable(), page_keys(range(8), 2)
    for key, page in zip(keys, (5, 3, 9), strict=False):
        table.add(key, page)
    assert table.match(keys) == [5, 3, 9]
    assert table.match(keys[:2]) == [5, 3]
    assert table.match(keys[1:]) == [3, 9]
    assert table.match([*page_keys([9, 9], 2), *keys]) == []
    table.remove([3, 77])  # 77 was never listed
    assert table.match(keys) == [5]


def test_the_first_page_under_a_key_stays() -> None:
    table, (key,) = PrefixTable(), page_keys([1], 1)
    table.add(key, 4)
    table.add(key, 6)
    table.remove([6])
    assert table.match([key]) == [4]
    table.remove([4])
    assert table.match([key]) == []
