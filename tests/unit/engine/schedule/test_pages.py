from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.engine.schedule import NULL_PAGE, PageAllocator


@settings(max_examples=200, deadline=None, derandomize=True)
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


def test_taking_too_many_takes_none() -> None:
    allocator = PageAllocator(4)
    try:
        allocator.allocate(4)
    except AssertionError:
        pass
    else:
        raise AssertionError("4 pages of 3 were handed out")
    assert allocator.allocate(3) == [1, 2, 3]
