"""What is cut for several processes, what is refused, and what a build of it holds."""

from __future__ import annotations
