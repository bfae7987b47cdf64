"""Random JSON schemas whose answers end soon."""

from hypothesis import strategies as st

NAMES = st.text("abcdefghij_ éß-", min_size=1, max_size=8)
TEXTS = st.text(st.characters(exclude_categories=["Cc", "Cs"], max_codepoint=0x3FFFF), max_size=6)
"""Without control characters: llguidance offers an escape of DEL from which it finds no way on. SmolLM2 has no tokens
for characters beyond U+3FFFF."""
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-1000, 1000), TEXTS)


@st.composite
def integers(draw):
    low = draw(st.integers(-500, 500))
    return {"type": "integer", "minimum": low, "maximum": low + draw(st.integers(0, 400))}


@st.composite
def objects(draw, values):
    properties = draw(st.dictionaries(NAMES, values, max_size=3))
    required = draw(st.lists(st.sampled_from(sorted(properties)), unique=True)) if properties else []
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def arrays(values):
    most = st.integers(0, 3)
    return st.builds(lambda items, count: {"type": "array", "items": items, "maxItems": count}, values, most)


LEAVES = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    integers(),
    st.builds(lambda most: {"type": "string", "maxLength": most}, st.integers(0, 12)),
    st.sampled_from([{"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,3}$"}, {"type": "string", "format": "date"}]),
    st.builds(lambda values: {"enum": values}, st.lists(SCALARS, min_size=1, max_size=4)),
    st.builds(lambda value: {"const": value}, SCALARS),
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        objects(inner), arrays(inner), st.builds(lambda some: {"anyOf": some}, st.lists(inner, min_size=1, max_size=3))
    ),
    max_leaves=6,
)
