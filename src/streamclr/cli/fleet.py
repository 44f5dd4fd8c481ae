"""What the commands of a fleet do."""

from streamclr.base.table import Table, percent
from streamclr.fleet.deploy import join, serve
from streamclr.fleet.keys import make_keys
from streamclr.fleet.options import DeviceOptions, KeysOptions, ServerOptions, SimulateOptions
from streamclr.fleet.simulate import simulate


def simulate_command(config: SimulateOptions) -> None:
    path, results = simulate(config)
    rows = [["linear probe, all labels", percent(results["linear_probe"])], ["kNN", percent(results["knn"])]]
    if "classifier" in results:
        rows.append([f"the fleet's classifier, {results['n_labels']} labels", percent(results["classifier"])])
    note = (
        f"{config.devices} devices, {results['rounds']} rounds, {results['images']:,} images; "
        f"{results['answers']} updates taken, {sum(results['refused'].values())} refused, "
        f"{results['failed']} failed, {results['silent']} silent"
    )
    Table("The fleet's encoder", ["", "accuracy"], rows, note).print()
    print(f"encoder: {path / 'model.safetensors'}")


def server_command(config: ServerOptions) -> int:
    return serve(config)


def device_command(config: DeviceOptions) -> None:
    join(config)


def keys_command(config: KeysOptions) -> None:
    directory, n_new = make_keys(config)
    print(f"{n_new} new device keys in {directory}: give each device its own, and ca.crt")
