"""The table of docs/reference/families.md names what a sample of models does."""

import family_table
import pytest

ROWS = {
    line.split("|")[1].strip().strip("`"): [cell.strip() for cell in line.split("|")[2:-1]]
    for line in family_table.PAGE.read_text().splitlines()
    if line.startswith("| `")
}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["cohere2", "olmoe", "gpt_neox", "seed_oss"])
def test_a_model_that_the_table_has_runs_as_the_table_says(model_type):
    row = family_table.measure(model_type, family_table.model_types()[model_type])
    assert row.how == "transformers"
    architecture, difference, *gaps = ROWS[model_type]
    assert row.architecture == architecture
    assert row.difference is not None
    assert row.difference < max(1e-4, 10 * float(difference))
    for found, listed in zip(row.gaps, gaps, strict=True):
        # Other CPUs may round in another order.
        assert found < max(1e-2, 10 * float(listed))


def test_every_model_that_runs_has_its_differences():
    by_transformers = {name: cells for name, cells in ROWS.items() if len(cells) == 4}
    assert len(by_transformers) > 70
    for cells in by_transformers.values():
        assert float(cells[1]) < 1e-3
