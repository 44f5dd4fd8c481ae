import pytest
from scipy.stats import t as student

from streamclr.base.statistics import mean_interval, seeds_note, spread, t_quantile, wilson


@pytest.mark.parametrize("freedom", [*range(1, 40), 100, 10_000])
def test_the_quantiles_are_students(freedom):
    assert t_quantile(freedom) == pytest.approx(student.ppf(0.975, freedom), abs=1e-4)


def test_the_interval_of_a_mean():
    values = [40.1, 41.3, 39.5]
    low, high = student.interval(0.95, 2, loc=sum(values) / 3, scale=0.9165 / 3**0.5)
    middle, half = mean_interval(values)
    assert (middle - half, middle + half) == pytest.approx((low, high), abs=1e-3)
    assert mean_interval([7.0]) == (7.0, 0.0)


def test_cells_show_the_interval_and_one_seed_the_value_alone():
    assert spread([]) == "–"
    assert spread([1.0]) == "1.0"
    assert spread([1.0, 3.0]) == "2.0 ± 12.7"  # 12.706 * sqrt(2) / sqrt(2)
    assert spread([1.0, 2.0, 3.0], 2) == "2.00 ± 2.48"
    assert spread([50.0, 50.0], unit=" %") == "50.0 % ± 0.0"
    assert spread([10_000.0, 12_000.0], 0) == "11,000 ± 12,706"
    assert seeds_note(3) == "3 seeds, mean ± 95 % interval"
    assert seeds_note(1) == "one seed"


def test_the_interval_of_a_share():
    assert wilson(50, 100) == pytest.approx((0.404, 0.596), abs=1e-3)
    assert wilson(0, 10)[0] == 0
    assert wilson(10, 10)[1] == 1
