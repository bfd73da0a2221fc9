"""One file for each engine that a bundle can be compared with, and one for the bundle itself."""
