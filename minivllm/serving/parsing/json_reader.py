"""A reader of JSON that takes a character at a time and notices the first wrong one."""

from __future__ import annotations

import json
from collections.abc import Generator

SPACE = " \t\r\n"
MOST_DEPTH = 64  # brackets inside each other

# Takes a character at each `yield`. What reads a value that only the next character ends (a number)
# returns that character, else "".
Reader = Generator[None, str, str]


class Malformed(Exception):
    """A character that JSON, or the object that is expected, does not have there."""


def expect(char: str, expected: str) -> None:
    if char != expected:
        raise Malformed


def literal(text: str) -> Reader:
    """This text and no other."""
    for char in text:
        expect((yield), char)
    return ""


def until(end: str, most: int | None = None) -> Reader:
    """Any text up to `end`, of so many characters at most; returns it."""
    text = ""
    while not text.endswith(end):
        if len(text) == most:
            raise Malformed
        text += yield
    return text.removesuffix(end)


def space(char: str) -> Reader:
    """Skip space, which `char` may be; returns the first other character."""
    while char in SPACE:
        char = yield
    return char


def text_value() -> Reader:
    """A string after its first quote; returns its value."""
    raw = ""
    while (char := (yield)) != '"':
        if char < " ":
            raise Malformed
        raw += char
        if char == "\\":
            raw += yield
            if raw[-1] == "u":
                for _ in range(4):
                    raw += yield
                    if raw[-1] not in "0123456789abcdefABCDEF":
                        raise Malformed
            elif raw[-1] not in '"\\/bfnrt':
                raise Malformed
    return str(json.loads(f'"{raw}"'))


def number(char: str) -> Reader:
    """A number that begins with `char`; returns the character after it."""
    if char == "-":
        char = yield
    if char == "0":
        char = yield
    else:
        char = yield from digits(char)
    if char == ".":
        char = yield from digits((yield))
    if char in ("e", "E"):
        char = yield
        if char in ("+", "-"):
            char = yield
        char = yield from digits(char)
    return char


def digits(char: str) -> Reader:
    """At least one digit; returns the character after them."""
    if char not in "0123456789":
        raise Malformed
    while char in "0123456789":
        char = yield
    return char


def value(char: str, depth: int) -> Reader:
    """A value that begins with `char`, inside so many brackets."""
    if depth > MOST_DEPTH:
        raise Malformed
    if char == "{":
        yield from members(depth + 1)
    elif char == "[":
        yield from elements(depth + 1)
    elif char == '"':
        yield from text_value()
    elif char in ("t", "f", "n"):
        yield from literal({"t": "rue", "f": "alse", "n": "ull"}[char])
    else:
        return (yield from number(char))
    return ""


def members(depth: int) -> Reader:
    """An object after its first bracket."""
    char = yield from space((yield))
    if char == "}":
        return ""
    while True:
        expect(char, '"')
        yield from text_value()
        expect((yield from space((yield))), ":")
        ahead = yield from value((yield from space((yield))), depth)
        char = yield from space(ahead or (yield))
        if char == "}":
            return ""
        expect(char, ",")
        char = yield from space((yield))


def elements(depth: int) -> Reader:
    """A list after its first bracket."""
    char = yield from space((yield))
    if char == "]":
        return ""
    while True:
        ahead = yield from value(char, depth)
        char = yield from space(ahead or (yield))
        if char == "]":
            return ""
        expect(char, ",")
        char = yield from space((yield))


def completed(text: str) -> str:
    """The longest object in the beginning of one, without the last member where that is not whole.

    Args:
        text: the beginning of a JSON object, in valid JSON; at least its first bracket.
    """
    closers, end, ending = "", 0, ""
    in_string = escaped = False
    for position, char in enumerate(text):
        if in_string:
            in_string = escaped or char != '"'
            escaped = char == "\\" and not escaped
        elif char == '"':
            in_string = True
        elif char in "{[":
            closers = ("}" if char == "{" else "]") + closers
            end, ending = position + 1, closers
        elif char in "}]":
            closers = closers[1:]
            end, ending = position + 1, closers
        elif char == ",":
            end, ending = position, closers
    return text[:end] + ending
