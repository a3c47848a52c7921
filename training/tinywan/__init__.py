"""A tiny Wan that has learned something: the videos it learns from, and the judge of those it makes."""
