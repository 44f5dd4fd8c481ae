"""The keys of a fleet: a certificate authority, the server's certificate, and a key pair for each device."""

import datetime
import ipaddress
from pathlib import Path

from streamclr.base.errors import UserError
from streamclr.base.files import sync, write_new
from streamclr.fleet.flower import need_flower
from streamclr.fleet.options import KeysOptions

CA, SERVER, DEVICE = "ca", "server", "device-{:04}"
LOOPBACK = ("localhost", "127.0.0.1")  # always in the certificate: the server connects to itself


def make_keys(config: KeysOptions) -> tuple[Path, int]:
    """Write the files that are missing and overwrite none. Returns the directory and the number of new device keys."""
    need_flower()  # cryptography is installed with it
    for name, value, most in (("days", config.days, 3650), ("devices", config.devices, 9999)):
        if not 1 <= value <= most:
            raise UserError(f"{name} is {value}: use 1 to {most}")
    hosts = [host.strip() for host in config.host.split(",") if host.strip()]
    if not hosts:
        raise UserError("--host is empty: give the names or addresses under which devices reach the server")
    directory = Path(config.directory)
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    certificate = directory / f"{SERVER}.crt"
    if not certificate.exists():
        _make_certificates(directory, [*hosts, *(own for own in LOOPBACK if own not in hosts)], config.days)
    elif config.host != KeysOptions.host:
        _check_hosts(certificate, hosts)
    new = [n for n in range(1, config.devices + 1) if not (directory / DEVICE.format(n)).exists()]
    for number in new:
        _make_device(directory / DEVICE.format(number))
    sync(directory)
    return directory, len(new)


def _make_device(path: Path) -> None:
    """A key pair as Flower reads it: P-384 in OpenSSH format."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

    key = ec.generate_private_key(ec.SECP384R1())
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    _write(path.with_name(f"{path.name}.pub"), public + b"\n", 0o644)
    _write(path, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()), 0o600)


def _make_certificates(directory: Path, hosts: list[str], days: int) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    def name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    now = datetime.datetime.now(datetime.timezone.utc)
    unused = "content_commitment key_encipherment data_encipherment key_agreement encipher_only decipher_only".split()
    keys = {who: ec.generate_private_key(ec.SECP384R1()) for who in (CA, SERVER)}

    def builder(who: str) -> x509.CertificateBuilder:
        usage = dict.fromkeys(unused, False) | {"digital_signature": who == SERVER}
        usage |= dict.fromkeys(("key_cert_sign", "crl_sign"), who == CA)
        return (
            x509.CertificateBuilder()
            .subject_name(name(f"streamclr fleet {who}"))
            .issuer_name(name(f"streamclr fleet {CA}"))
            .public_key(keys[who].public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))  # the clocks of devices are not exact
            .not_valid_after(now + datetime.timedelta(days=days))
            .add_extension(x509.BasicConstraints(ca=who == CA, path_length=0 if who == CA else None), critical=True)
            .add_extension(x509.KeyUsage(**usage), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(keys[who].public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(keys[CA].public_key()), critical=False)
        )

    names = x509.SubjectAlternativeName([_alternative(host) for host in hosts])
    server = builder(SERVER).add_extension(names, critical=False)
    server = server.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    for who, made in ((CA, builder(CA)), (SERVER, server)):
        private = keys[who].private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        _write(directory / f"{who}.key", private, 0o600)
        certificate = made.sign(keys[CA], hashes.SHA384())
        _write(directory / f"{who}.crt", certificate.public_bytes(Encoding.PEM), 0o644)


def _check_hosts(certificate: Path, hosts: list[str]) -> None:
    from cryptography import x509

    extensions = x509.load_pem_x509_certificate(certificate.read_bytes()).extensions
    known = list(extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    for host in hosts:
        if _alternative(host) not in known:
            raise UserError(f"{certificate} is not for {host}: give another directory, with new keys for all devices")


def _alternative(host: str):  # type: ignore[no-untyped-def]  # a type of cryptography, which only the extra `fleet` installs
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write(path: Path, content: bytes, mode: int) -> None:
    """Write a new file that has its final permissions from the start."""
    try:
        write_new(path, [content], mode)
    except FileExistsError:
        raise UserError(f"{path} exists already: keys are never overwritten; give another directory") from None
