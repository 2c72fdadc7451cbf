//! Paged caches.
