# Sourced by scripts that install packages of Debian, which several steps of .ci/run may do at once. The sourcing script defines
# `unavailable`.

# From here on this script alone uses apt-get.
lock_apt() {
    exec {apt_lock}>"${TMPDIR:-/tmp}/regard-apt-lock"
    flock "$apt_lock"
    apt-get update -qq || unavailable "apt-get update failed"
}

# Installs packages, and lets others use apt-get.
install_and_unlock() {
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null ||
        unavailable "apt-get could not install $*"
    exec {apt_lock}>&-
}
