"""Cutting a text into sentences, for data whose samples are pairs of sentences (BERT) or spans (T5). PURE.

By rule: a sentence ends behind . ! ? or their wide forms (with closing quotes or brackets) where white space follows
and the next word does not begin with a lower-case letter, and the word before is neither a single letter nor one of the
abbreviations of the language that are followed by names. Texts of languages without white space between sentences are
cut behind their own full stops.
"""

from __future__ import annotations

import re

_WORDS = {
    "english": """mr mrs ms dr prof rev gen col lt capt sgt st sr jr messrs mme mlle hon gov sen rep pres vs etc cf e.g
        i.e viz ed eds al approx dept est inc ltd co corp univ jan feb mar apr jun jul aug sep sept oct nov dec""",
    "german": """dr prof hr fr frl st bzw usw z.b d.h u.a u.s.w etc ca evtl ggf inkl exkl bsp vgl bd abs art anm aufl
        geb gest jan feb mär apr jun jul aug sep sept okt nov dez mio mrd str tel sog zit o.ä u.ä v.a i.d.r""",
    "french": """m mm mme mmes mlle mlles dr pr st ste me mgr cf etc p.ex c.-à-d env av apr éd vol chap art fig janv
        févr avr juil sept oct nov déc bd tél""",
    "spanish": """sr sra srta sres dr dra prof profa d dña ud uds vd vds etc p.ej pág págs art cap fig núm tel avda
        gral cía ene feb mar abr jun jul ago sept oct nov dic""",
    "italian": """sig sigg sig.ra sig.na dott dott.ssa prof ing avv arch on s ss ecc es p.es cfr cap art fig vol pag
        pagg gen feb mar apr mag giu lug ago set ott nov dic""",
    "portuguese": """sr sra srs dr dra prof profa d v exa ex.a etc p.ex pág págs art cap fig núm tel av jan fev mar abr
        mai jun jul ago set out nov dez""",
    "dutch": """dhr mevr mw dr prof ir ing drs mr st bijv bv enz e.d d.w.z o.a t.a.v i.v.m ca nl resp blz art fig jan
        feb mrt apr jun jul aug sep sept okt nov dec""",
}
LANGUAGES = tuple(_WORDS)
_ABBREVIATIONS = {language: frozenset(words.split()) for language, words in _WORDS.items()}
_ORDINALS = ("german",)  # where a number with a full stop is "the third"
_BEFORE_NUMBERS = frozenset(("no", "nos", "vol", "vols", "fig", "figs", "eq", "ch", "sec", "pp", "p"))
_END = re.compile(r"[.!?\u2026]+[\"'\u2019\u201d\u00bb)\]]*(?=\s)|[\u3002\uff01\uff1f]+[\u300d\u300f\u201d\u2019]*")
_WORD_BEFORE = re.compile(r"([^\s\"'(\[]+?)[.!?\u2026]+[\"'\u2019\u201d\u00bb)\]]*$")


def split_sentences(text: str, keep_newlines: bool = False, language: str = "english") -> list[str]:
    """The sentences of a text, in order, without the white space around them.

    A blank line always ends one. keep_newlines: the white space behind a sentence stays with it, so that the sentences
    joined are the text. language: one of LANGUAGES, whose abbreviations end no sentence.
    """
    sentences, start = [], 0
    for end in sorted({*_ends(text, language), *(m.start() for m in re.finditer(r"\n[ \t]*\n", text)), len(text)}):
        if keep_newlines:
            while end < len(text) and text[end].isspace():
                end += 1
        piece = text[start:end]
        if end > start and not piece.isspace():
            sentences.append(piece if keep_newlines else " ".join(piece.split()))
            start = end
    return sentences


def _ends(text: str, language: str) -> list[int]:
    found = []
    for mark in _END.finditer(text):
        end = mark.end()
        rest = text[end : end + 64].lstrip()
        if rest and (
            rest[0].islower()
            or (text[mark.start()] == "." and _is_abbreviation(text[max(0, end - 40) : end], rest, language))
        ):
            continue
        found.append(end)
    return found


def _is_abbreviation(before: str, rest: str, language: str) -> bool:
    """Whether the word that the text ends with, before its full stop, is an initial or an abbreviation."""
    match = _WORD_BEFORE.search(before)
    word = match.group(1).lower() if match else ""
    if word in _BEFORE_NUMBERS:
        return rest[0].isdigit()
    if language in _ORDINALS and word.isdigit() and len(word) < 3:
        return True
    return word in _ABBREVIATIONS[language] or (len(word) == 1 and word.isalpha() and word != "i")
