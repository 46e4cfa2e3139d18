from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from zero2all.generation.sampling import TextStream

BYTES = [bytes([value]) for value in range(256)]  # a token for each byte


def pieces(data: bytes, stop: list[str], size: int = 1) -> tuple[list[str], TextStream]:
    """The text of tokens pushed ``size`` at a time, up to a stop string."""
    stream, out = TextStream(BYTES, stop), []
    for first in range(0, len(data), size):
        out.append(stream.push(data[first : first + size]))
        if stream.stopped:
            return out, stream
    return [*out, stream.finish()], stream


def test_a_character_is_never_split() -> None:
    text = "中a😀é"
    out, _ = pieces(text.encode(), [])
    assert out == ["", "", "中", "a", "", "", "", "😀", "", "é", ""]


def test_the_beginning_of_a_stop_string_is_held_back_until_it_is_certain() -> None:
    out, stream = pieces(b"a\n\nb", ["\n\n\n"])
    assert out == ["a", "", "", "\n\nb", ""]
    assert not stream.stopped
    out, stream = pieces(b"a\n\n\nb", ["\n\n\n"])
    assert out == ["a", "", "", ""]
    assert stream.stopped


def test_the_text_ends_before_the_first_stop_string() -> None:
    out, stream = pieces("一二三四".encode(), ["四", "二三", "三"], size=100)
    assert "".join(out) == "一"
    assert stream.stopped


@settings(max_examples=100)
@given(
    st.lists(st.sampled_from([b"a", b"b", "中".encode(), "😀".encode(), b"\xe4", b"\x80", b"\xf0\x9f", b"\xff"])),
    st.lists(st.text("ab中😀", min_size=1, max_size=3), max_size=3),
    st.integers(1, 5),
)
def test_pieces_are_the_text_up_to_the_first_stop_string(parts: list[bytes], stop: list[str], size: int) -> None:
    data = b"".join(parts)
    out, stream = pieces(data, stop, size)
    # What has arrived when the first stop string is complete, and what of that comes before any stop string.
    arrived = next(
        (
            data[:end]
            for end in [*range(size, len(data), size), len(data)]
            if any(text in data[:end].decode("utf-8", "replace") for text in stop)
        ),
        None,
    )
    text = (data if arrived is None else arrived).decode("utf-8", "replace")
    places = [place for string in stop if (place := text.find(string)) >= 0]
    assert stream.stopped == (arrived is not None)
    assert "".join(out) == (text[: min(places)] if places else text)
