"""The table of docs/reference/families.md names what a sample of models does."""

import family_table
import pytest

ROWS = {
    row.model_type: row
    for row in family_table.written_rows(
        family_table.PAGE.read_text().partition(family_table.MARK)[2]
    )
}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["cohere2", "olmoe", "gpt_neox", "seed_oss"])
def test_a_model_that_the_table_has_runs_as_the_table_says(model_type):
    row = family_table.measure(model_type, family_table.model_types()[model_type])
    assert row.how == "transformers"
    listed = ROWS[model_type]
    assert row.difference is not None
    assert listed.difference is not None
    assert row.difference < max(1e-4, 10 * listed.difference)
    for found, expected in zip(row.gaps, listed.gaps, strict=True):
        # Other CPUs may round in another order.
        assert found < max(1e-2, 10 * expected)


def test_every_model_that_runs_has_its_differences():
    by_transformers = [row for row in ROWS.values() if row.how == "transformers"]
    assert len(by_transformers) > 70
    for row in by_transformers:
        assert row.difference is not None
        assert row.difference < 1e-3
        assert len(row.gaps) == 2


def test_the_page_is_read_as_it_was_written():
    text = family_table.PAGE.read_text().partition(family_table.MARK)[2]
    assert family_table.page(list(ROWS.values())) == text.lstrip("\n")


@pytest.mark.parametrize(
    ("reason", "general"),
    [
        (
            "it has layers of the types linear_attention (MambaMixer), and planish runs none",
            "it has layers of the types linear_attention, and planish runs none",
        ),
        ("a.0.conv is a convolution over positions", "a module is a convolution over positions"),
        ("its logits are wrong (RuntimeError: meta (x))", "its logits are wrong"),
        ("set max_position_embeddings (context)", "set max_position_embeddings (context)"),
    ],
)
def test_models_refused_for_one_reason_are_one_row(reason, general):
    assert family_table.general_reason(reason) == general
