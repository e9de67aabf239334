"""GPUs of papers, with the float32 rate and the memory rate of their data sheets: rates of modelled costs.

The float32 rate is two operations per core and boost clock. The memory rate is the bus width by the data rate.
"""

from autotune.capture.fake.modelled_costs import DeviceRates

GTX_TITAN_X = DeviceRates("GeForce GTX Titan X", flops_per_second=2 * 3072 * 1.075e9, bytes_per_second=384 / 8 * 7.01e9)
TESLA_P100 = DeviceRates("Tesla P100", flops_per_second=2 * 3584 * 1.303e9, bytes_per_second=4096 / 8 * 1.43e9)
TITAN_V = DeviceRates("Titan V", flops_per_second=2 * 5120 * 1.455e9, bytes_per_second=3072 / 8 * 1.7e9)
RTX_2080_TI = DeviceRates("GeForce RTX 2080 Ti", flops_per_second=2 * 4352 * 1.545e9, bytes_per_second=352 / 8 * 14e9)


def describe_rates(card: DeviceRates) -> str:
    """Describe modelled time, with the rates of a card."""
    return (
        f"time modelled with the data-sheet rates of a {card.name} "
        f"({card.flops_per_second / 1e12:.1f} TFLOP/s, {card.bytes_per_second / 1e9:.0f} GB/s)"
    )
