"""Rates of the graphics cards on which papers measured, from their makers' data sheets; nothing was measured on them.

Flops are two for each core and boost clock cycle. Bytes are the width of the memory's bus by its data rate.
"""

from autotune.capture.fake.modelled_costs import DeviceRates


def _rates(name: str, cores: int, boost_hertz: float, bus_bits: int, bits_per_second: float) -> DeviceRates:
    return DeviceRates(name, 2 * cores * boost_hertz, bus_bits / 8 * bits_per_second)


TITAN_X = _rates("GTX Titan X", 3072, 1.075e9, 384, 7.01e9)
TESLA_P100 = _rates("Tesla P100, 16 GB", 3584, 1.303e9, 4096, 1.43e9)
TITAN_V = _rates("Titan V", 5120, 1.455e9, 3072, 1.7e9)
RTX_2080_TI = _rates("RTX 2080 Ti", 4352, 1.545e9, 352, 14e9)


def describe_rates(card: DeviceRates) -> str:
    """Return a card with its rates, for the conditions of a claim.

    >>> describe_rates(TITAN_V)
    'time modelled by the data sheet of a Titan V (14.9 TFLOP/s, 653 GB/s)'
    """
    flops, moved = card.flops_per_second / 1e12, card.bytes_per_second / 1e9
    return f"time modelled by the data sheet of a {card.name} ({flops:.1f} TFLOP/s, {moved:.0f} GB/s)"
