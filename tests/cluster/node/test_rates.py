from medusa_cluster.node.rates import Rates


def test_a_rate_is_of_the_last_readings() -> None:
    rates = Rates()
    assert rates.read("a", 0, 0.0) == 0
    assert rates.read("a", 100, 1.0) == 100
    assert rates.read("a", 100, 1.1) == 100  # too soon to say something new
    assert 0 < rates.read("a", 100, 2.0) < 100
    for second in range(3, 20):
        rate = rates.read("a", 100, float(second))
    assert rate == 0


def test_a_counter_that_begins_anew_has_no_rate() -> None:
    rates = Rates()
    rates.read("a", 1000, 0.0)
    assert rates.read("a", 10, 1.0) == 0
    assert rates.read("a", 60, 2.0) == 50


def test_names_that_are_gone_are_forgotten() -> None:
    rates = Rates()
    rates.read("a", 0, 0.0)
    rates.keep({"b"})
    assert rates.read("a", 500, 1.0) == 0
