"""A small GTSRB in the official layout: every frame has one colour, which tells class, track and frame."""

import tarfile
import zipfile

N_CLASSES, N_TRACKS, N_FRAMES = 43, 6, 2
COLUMNS = "Filename;Width;Height;Roi.X1;Roi.Y1;Roi.X2;Roi.Y2;ClassId"


def colour(label, track, frame):
    return 5 * label, 20 * track, 50 * frame


def ppm(size, rgb):
    return b"P6\n%d %d\n255\n" % (size, size) + bytes(rgb) * size**2


def listing(names, labels):
    rows = [f"{name};8;8;1;1;7;7;{label}" for name, label in zip(names, labels, strict=True)]
    return "\r\n".join([COLUMNS, *rows, ""])


def write_training(root, size=8):
    """`root`/GTSRB/Final_Training; the frames of each class are listed in no order."""
    for label in range(N_CLASSES):
        folder = root / "GTSRB" / "Final_Training" / "Images" / f"{label:05}"
        folder.mkdir(parents=True)
        frames = [(track, frame) for track in range(N_TRACKS) for frame in range(N_FRAMES)]
        for track, frame in frames:
            (folder / f"{track:05}_{frame:05}.ppm").write_bytes(ppm(size, colour(label, track, frame)))
        names = [f"{track:05}_{frame:05}.ppm" for track, frame in reversed(frames)]
        (folder / f"GT-{label:05}.csv").write_text(listing(names, [label] * len(names)))
    return root / "GTSRB"


def write_test(root, n=7, size=8):
    """`root`/GTSRB/Final_Test with n images, of classes 42, 41, …, and their labels beside GTSRB, as unpacked."""
    folder = root / "GTSRB" / "Final_Test" / "Images"
    folder.mkdir(parents=True)
    names, labels = [f"{i:05}.ppm" for i in range(n)], [42 - i for i in range(n)]
    for name, label in zip(names, labels, strict=True):
        (folder / name).write_bytes(ppm(size, colour(label, 9, 0)))
    (folder / "GT-final_test.test.csv").write_text(COLUMNS.removesuffix(";ClassId"))  # the official one without labels
    (root / "GT-final_test.csv").write_text(listing(names, labels))


def pack_zip(file, root, paths):
    with zipfile.ZipFile(file, "w") as archive:
        for path in sorted(paths):
            archive.write(path, path.relative_to(root))
    return file


def pack_tar(file, root, paths):
    with tarfile.open(file, f"w:{file.suffix[1:]}") as archive:
        for path in sorted(paths, reverse=True):
            archive.add(path, path.relative_to(root), recursive=False)
    return file


def files(folder):
    return [path for path in folder.rglob("*") if path.is_file()]
