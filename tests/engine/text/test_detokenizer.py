"""Streamed text equals the text decoded at once, whatever the tokens and however they arrive."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling_params import SamplingParams
from engine.text.detokenizer import ByteDecoder, StopStrings, TextDecoders, TextStream, WindowDecoder
from engine.text.tokenizer import Tokenizer
from tests import tiny_tokenizer
from tests.long import examples

BYTE_LEVEL = tiny_tokenizer.byte_level()
SENTENCEPIECE = tiny_tokenizer.sentencepiece_like()
METASPACE = tiny_tokenizer.metaspace()
BACKENDS = {"byte_level": BYTE_LEVEL, "sentencepiece": SENTENCEPIECE, "metaspace": METASPACE}
DECODERS = {name: TextDecoders(backend) for name, backend in BACKENDS.items()}
TEXTS = st.text(st.sampled_from("ab \n.é東🙂🚀👩‍👧🇩🇪<|"), max_size=30)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer(str(tiny_tokenizer.save(tiny_tokenizer.byte_level(), tmp_path_factory.mktemp("tokenizer"))))


def chunked(draw, ids):
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    return [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


def stream_text(stream, chunks):
    return "".join([stream.push(chunk) for chunk in chunks] + [stream.flush()])


@settings(max_examples=300)
@given(st.data())
@pytest.mark.parametrize("style", BACKENDS)
def test_deltas_join_to_the_decoding_of_all_tokens(style, data):
    ids = BACKENDS[style].encode(data.draw(TEXTS), add_special_tokens=False).ids
    stream = TextStream(DECODERS[style].decoder(True))
    assert stream_text(stream, chunked(data.draw, ids)) == BACKENDS[style].decode(ids)
    assert stream.num_tokens == len(ids)


@settings(max_examples=300)
@given(st.data())
def test_any_bytes_at_all_give_the_text_that_the_tokenizer_gives(data):
    ids = data.draw(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() + 2), max_size=30))
    skip = data.draw(st.booleans())
    stream = TextStream(DECODERS["byte_level"].decoder(skip))
    assert stream_text(stream, chunked(data.draw, ids)) == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)


@settings(max_examples=200)
@given(st.data())
def test_a_window_of_tokens_gives_the_same_text_as_the_byte_table(data):
    ids = BYTE_LEVEL.encode(data.draw(TEXTS), add_special_tokens=False).ids
    window = TextStream(WindowDecoder(BYTE_LEVEL, True))
    assert stream_text(window, chunked(data.draw, ids)) == BYTE_LEVEL.decode(ids)


@pytest.mark.parametrize("style", BACKENDS)
def test_a_split_emoji_is_never_shown_broken(style):
    text = "a🚀b🙂 東京 👩‍👩‍👧 z" if style != "metaspace" else "Москва 東京"
    ids = BACKENDS[style].encode(text, add_special_tokens=False).ids
    stream = TextStream(DECODERS[style].decoder(True))
    deltas = [stream.push([token]) for token in ids]
    assert "".join(deltas) == BACKENDS[style].decode(ids)
    assert not any("\ufffd" in delta for delta in deltas)


def test_the_end_of_a_stream_shows_half_a_character_as_the_tokenizer_does():
    ids = BYTE_LEVEL.encode("🚀").ids  # four tokens: no merge joins its bytes
    half = ids[: len(ids) - 1]
    stream = TextStream(DECODERS["byte_level"].decoder(True))
    assert stream.push(half) == ""
    assert stream.flush() == BYTE_LEVEL.decode(half) == "\ufffd"


@pytest.mark.parametrize("count", [8, 9, 200])
def test_a_character_after_many_skipped_tokens_is_whole(count):
    (skipped,) = BYTE_LEVEL.encode(tiny_tokenizer.SPECIAL[0]).ids
    ids = [*BYTE_LEVEL.encode("a").ids, *[skipped] * count, *BYTE_LEVEL.encode("🚀東").ids]
    window = TextStream(WindowDecoder(BYTE_LEVEL, True))
    assert "".join([window.push([token]) for token in ids] + [window.flush()]) == "a🚀東"


def test_broken_bytes_for_ever_do_not_hold_the_stream_back():
    broken = BYTE_LEVEL.token_to_id("ÿ")  # byte FF, which no text contains
    stream = TextStream(WindowDecoder(BYTE_LEVEL, True))
    shown = "".join(stream.push([broken]) for _ in range(40))
    assert len(shown) >= 24


def expected_with_stops(pieces, stops, include):
    """Reference: read the text a character at a time; the longest stop that ends first wins."""
    text = ""
    for count, piece in enumerate(pieces, 1):
        for letter in piece:
            text += letter
            hits = [stop for stop in stops if text.endswith(stop)]
            if hits:
                return (text if include else text[: -len(max(hits, key=len))]), count
    return text, None


@settings(max_examples=examples(500))
@given(st.data())
def test_stop_strings_cut_the_text_at_the_same_place_however_it_arrives(data):
    text = data.draw(TEXTS)
    bounds = st.tuples(st.integers(0, len(text)), st.integers(1, 6))
    parts = [text[a : a + n] for a, n in data.draw(st.lists(bounds, max_size=4))]
    stops = [part for part in parts if part] + data.draw(st.lists(st.sampled_from(["ab", "aba", "b 🙂"]), max_size=2))
    include = data.draw(st.booleans())
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False).ids
    alone = TextStream(DECODERS["byte_level"].decoder(True))
    pieces = [alone.push([token]) for token in ids]

    stream = TextStream(DECODERS["byte_level"].decoder(True), StopStrings(stops) if stops else None, include)
    shown = stream_text(stream, chunked(data.draw, ids))

    expected, used = expected_with_stops(pieces, stops, include)
    assert shown == expected
    assert stream.stopped == (used is not None)
    assert stream.num_tokens == (used or len(ids))


def test_nothing_of_a_stop_string_is_shown_before_it_is_known_not_to_be_one():
    ids = {letter: BYTE_LEVEL.token_to_id(letter) for letter in "abcx"}
    stream = TextStream(DECODERS["byte_level"].decoder(True), StopStrings(["abc"]))
    assert [stream.push([ids[letter]]) for letter in "xababx"] == ["x", "", "", "ab", "", "abx"]
    assert [stream.push([ids[letter]]) for letter in "abc"] == ["", "", ""]
    assert stream.stopped
    assert stream.push([ids["x"]]) == "" == stream.flush()
    assert stream.num_tokens == 9


def test_stop_strings_wait_for_min_tokens(tokenizer):
    ids = [tokenizer.encode(letter)[0] for letter in "aaaa"]
    stream = tokenizer.text_streams(SamplingParams(stop=("a",), min_tokens=2))[0]
    assert stream_text(stream, [ids]) == "aa"
    assert stream.num_tokens == 3


def test_the_stop_token_is_counted_but_not_shown(tokenizer):
    ids = tokenizer.encode("hi") + tokenizer.encode(".")
    for stops in ((), ("zzz",)):
        stream = tokenizer.text_streams(SamplingParams(stop=stops))[0]
        assert stream.push(ids, ends_with_stop_token=True) == "hi"
        assert stream.num_tokens == len(ids)
        shown = tokenizer.text_streams(SamplingParams(stop=stops, include_stop_str_in_output=True))[0]
        assert shown.push(ids, ends_with_stop_token=True) == "hi."
        assert shown.num_tokens == len(ids)


def test_each_choice_has_its_own_stream(tokenizer):
    first, second = tokenizer.text_streams(SamplingParams(n=2, stop=("b",)))
    assert first.push(tokenizer.encode("xb")) == "x"
    assert first.stopped
    assert not second.stopped
    assert second.push(tokenizer.encode("x")) == "x"


def test_a_stream_is_rebuilt_from_the_token_log(tokenizer):
    params = SamplingParams(stop=("fox over",))
    ids = tokenizer.encode("the 🙂 fox ov🙂 fox over the dog")
    for cut in range(len(ids)):
        whole, resumed = tokenizer.text_streams(params)[0], tokenizer.text_streams(params)[0]
        before = whole.push(ids[:cut])
        assert resumed.push(ids[:cut]) == before
        assert resumed.push(ids[cut:]) == whole.push(ids[cut:])
        assert resumed.num_tokens == whole.num_tokens


@pytest.mark.parametrize("style", BACKENDS)
def test_text_that_follows_a_prompt_joins_it(style):
    backend = BACKENDS[style]
    whole = backend.encode("The quick brown fox", add_special_tokens=False).ids
    for cut in range(1, len(whole)):
        stream = TextStream(DECODERS[style].decoder(True, whole[:cut]))
        assert (
            backend.decode(whole[:cut]) + stream_text(stream, [[one] for one in whole[cut:]]) == "The quick brown fox"
        )


def test_text_after_special_tokens_alone_begins_here():
    ids = SENTENCEPIECE.encode("The fox", add_special_tokens=False).ids
    stream = TextStream(DECODERS["sentencepiece"].decoder(True, [SENTENCEPIECE.token_to_id("<s>")]))
    assert stream_text(stream, [ids]) == "The fox"


def test_real_tokenizer_families_take_the_fast_path():
    assert isinstance(DECODERS["byte_level"].decoder(True), ByteDecoder)
    assert isinstance(DECODERS["sentencepiece"].decoder(True), ByteDecoder)
    assert isinstance(DECODERS["metaspace"].decoder(True), WindowDecoder)


def test_token_bytes_join_to_the_text(tokenizer):
    text = "naïve 🙂"
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))).decode() == text
