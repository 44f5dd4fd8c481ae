"""The commands `fleet simulate` and `fleet keys`."""

from streamclr.base.table import Table, percent
from streamclr.fleet.keys import make_keys
from streamclr.fleet.options import KeysOptions, SimulateOptions
from streamclr.fleet.simulate import simulate


def simulate_command(config: SimulateOptions) -> None:
    path, results = simulate(config)
    rows = [["linear probe, all labels", percent(results["linear_probe"])], ["kNN", percent(results["knn"])]]
    if "classifier" in results:
        rows.append([f"the fleet's classifier, {results['n_labels']} labels", percent(results["classifier"])])
    note = (
        f"{config.devices} devices, {results['rounds']} rounds, {results['images']:,} images; "
        f"{results['answers']} updates accepted, {sum(results['refused'].values())} rejected, "
        f"{results['failed']} failed, {results['silent']} without an answer"
    )
    Table("The fleet's encoder", ["", "accuracy"], rows, note).print()
    print(f"encoder: {path / 'model.safetensors'}")


def keys_command(config: KeysOptions) -> None:
    directory, n_new = make_keys(config)
    print(f"{n_new} new device keys in {directory}: copy to each device its own key and ca.crt")
