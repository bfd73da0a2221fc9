"""The pages of a pool: who holds them, and which of them hold a beginning that is known."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

SCRATCH = 0
"""The page that padding and idle rows write, and that no text has."""


class Prefix:
    """The tokens of a text from its start to the end of a full page, as a chain of pages.

    Equal when all tokens are: the hash, made of the chain's, only finds candidates.
    """

    __slots__ = ("_hash", "num_pages", "parent", "tokens")

    def __init__(self, parent: Prefix | None, tokens: tuple[int, ...]) -> None:
        self.parent = parent
        self.tokens = tokens
        self.num_pages: int = 1 if parent is None else parent.num_pages + 1
        self._hash = chain_hash(0 if parent is None else hash(parent), tokens)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Prefix):
            return NotImplemented
        mine: Prefix | None = self
        theirs: Prefix | None = other
        while mine is not theirs:  # a shared beginning need not be compared
            if mine is None or theirs is None or mine.tokens != theirs.tokens:
                return False
            mine, theirs = mine.parent, theirs.parent
        return True


def chain_hash(before: int, tokens: tuple[int, ...]) -> int:
    """The hash of a chain that ends with these tokens; the same in every process."""
    return hash((before, tokens))


class PagePool:
    """Pages 1 to `num_pages`: each is free, held by one or more texts, or cached.

    A cached page is held by no text, but its prefix is known: it can be held again, until its
    room is needed. The one unused for longest goes first.
    """

    def __init__(self, num_pages: int, page_size: int, *, has_prefix_cache: bool = True) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._has_prefix_cache = has_prefix_cache
        self._free = list(range(num_pages, 0, -1))
        self._holders: Counter[int] = Counter()
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._page_of: dict[Prefix, int] = {}
        self._prefix_of: dict[int, Prefix] = {}

    @property
    def num_available(self) -> int:
        """Pages that can be had: free or cached."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Pages that no text holds and that can be held again."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Pages that texts hold."""
        return self.num_pages - self.num_available

    def known(self, tokens: Sequence[int]) -> list[int]:
        """The pages that hold the beginning of a text; always less than the whole text."""
        pages: list[int] = []
        prefix: Prefix | None = None
        for end in range(self.page_size, len(tokens), self.page_size):
            page = self._page_of.get(Prefix(prefix, tuple(tokens[end - self.page_size : end])))
            if page is None:
                break
            pages.append(page)
            prefix = self._prefix_of[page]
        return pages

    def num_to_take(self, num_pages: int, known: Sequence[int]) -> int:
        """How many of the available pages a text of so many pages takes, some of them known."""
        return num_pages - sum(1 for page in known if page not in self._cached)

    def hold(self, pages: Iterable[int]) -> Prefix | None:
        """Holds known pages once more; returns the prefix of the last."""
        prefix = None
        for page in pages:
            self._cached.pop(page, None)
            self._holders[page] += 1
            prefix = self._prefix_of[page]
        return prefix

    def take(self, num_pages: int) -> list[int]:
        """New pages for one text; their contents are undefined. So many must be available."""
        assert num_pages <= self.num_available
        return [self._take_one() for _ in range(num_pages)]

    def publish(self, page: int, parent: Prefix | None, tokens: Sequence[int]) -> Prefix:
        """Tells that a held page is full of these tokens after `parent`; returns its prefix.

        Where another page holds the same beginning already, that one stays the known one.
        """
        assert len(tokens) == self.page_size
        prefix = Prefix(parent, tuple(tokens))
        if not self._has_prefix_cache:
            return prefix
        known = self._page_of.setdefault(prefix, page)
        if known == page:
            self._prefix_of[page] = prefix
        return self._prefix_of[known]

    def release(self, pages: Sequence[int]) -> None:
        """A text lets go of its pages."""
        for page in reversed(pages):  # so that the end of a text is evicted before its beginning
            if self._drop(page):
                if page in self._prefix_of:
                    self._cached[page] = None
                else:
                    self._free.append(page)

    def discard(self, pages: Sequence[int]) -> list[int]:
        """As `release`, for pages whose contents may be wrong: they are not known any more.

        Returns:
            Those that nobody holds now.
        """
        for page in pages:
            self._forget(page)
        freed = [page for page in reversed(pages) if self._drop(page)]
        self._free += freed
        return freed

    def check(self, held: Iterable[Sequence[int]]) -> None:
        """Asserts that every page is where it should be, given the pages of every text."""
        holders = Counter(page for pages in held for page in pages)
        assert {page: num for page, num in self._holders.items() if num} == dict(holders)
        places = [*self._free, *self._cached, *holders]
        assert sorted(places) == list(range(1, self.num_pages + 1))
        assert {self._page_of[prefix]: prefix for prefix in self._page_of} == self._prefix_of
        assert self._cached.keys() <= self._prefix_of.keys()
        assert not self._prefix_of.keys() & set(self._free)

    def _take_one(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._cached.popitem(last=False)
            self._forget(page)
        self._holders[page] = 1
        return page

    def _drop(self, page: int) -> bool:
        """One holder less; whether it was the last."""
        assert self._holders[page] > 0
        self._holders[page] -= 1
        if self._holders[page]:
            return False
        del self._holders[page]
        return True

    def _forget(self, page: int) -> None:
        prefix = self._prefix_of.pop(page, None)
        if prefix is not None:
            del self._page_of[prefix]
