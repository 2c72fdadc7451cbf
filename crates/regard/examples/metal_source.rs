//! Prints the source of the Metal kernels, to make a metallib from: see `docs/metal.md`.

fn main() {
    print!("{}", regard::metal::source());
}
